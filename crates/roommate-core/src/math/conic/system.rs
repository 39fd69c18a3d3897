//! The linear system of a step, `[[0, Gᵀ], [G, −W²]]`, with a small regularisation of every
//! diagonal.
//!
//! Every block is eliminated separately; what remains is a dense system of the links and the common
//! variable. Close to a solution the entries differ by orders of magnitude, so solutions are
//! refined.

use super::second_order::{Cone, Scaling};
use super::{Program, Sizes, add, dot, largest, sized};

/// Added to the diagonal, with its sign.
const REGULAR: f64 = 7e-8;
/// Pivots smaller than this are replaced by [`INSTEAD`].
const TINY: f64 = 1e-13;
const INSTEAD: f64 = 2e-7;
const REFINEMENTS: usize = 9;
/// Sufficient precision relative to the right side. The study's solver asks for two digits more,
/// which changes none of its results.
const PRECISION: f64 = 1e-12;
/// A refinement that improves by a smaller factor is the last.
const WORTHWHILE: f64 = 6.0;

/// A direction: changes of the variables and of the duals of the rows.
#[derive(Debug)]
pub(super) struct Direction {
    pub(super) x: Vec<f64>,
    pub(super) z: Vec<f64>,
}

/// Two auxiliary unknowns per cone, with which its W² is written without cancellation. They count
/// as variables of the block.
type Inner = Vec<[f64; 2]>;

pub(super) struct System {
    /// 1 ÷ (W² + regularisation) of each row; of cones, only of its diagonal.
    weights: Vec<f64>,
    /// Factors of the three rows of each cone, inner unknowns included.
    cones: Vec<f64>,
    /// Inverse of each block's own part.
    inverse: Vec<f64>,
    /// Effect of the common variable on each variable.
    pull: Vec<f64>,
    /// The system of links and common variable, as L·D·Lᵀ.
    core: Vec<f64>,
    // Buffer of the refinement.
    error: Direction,
    inner_error: Inner,
    correction: Direction,
    inner_correction: Inner,
    inner: Inner,
    right: Vec<f64>,
    own: Vec<f64>,
    small: Vec<f64>,
}

impl System {
    pub(super) fn new(p: &Program) -> Self {
        let (vars, rows, links) = (p.costs.len(), p.bounds.len(), p.links.len());
        let cones = if p.shape.cone { p.blocks.len() } else { 0 };
        let direction = || Direction { x: vec![0.0; vars], z: vec![0.0; rows] };
        let locals = vars + 2 * cones;
        Self {
            weights: vec![0.0; rows],
            cones: vec![0.0; 3 * locals * usize::from(p.shape.cone)],
            inverse: vec![0.0; p.squares],
            pull: vec![0.0; locals],
            core: vec![0.0; (links + 1) * (links + 1)],
            error: direction(),
            inner_error: vec![[0.0; 2]; cones],
            correction: direction(),
            inner_correction: vec![[0.0; 2]; cones],
            inner: vec![[0.0; 2]; cones],
            right: vec![0.0; locals],
            own: vec![0.0; locals],
            small: vec![0.0; links + 1],
        }
    }

    pub(super) fn factor(&mut self, p: &Program, scaling: &Scaling) {
        sized!(p, self.factor_sized(p, scaling));
    }

    fn factor_sized<const W: usize, const CONE: bool>(&mut self, p: &Program, scaling: &Scaling) {
        let size = p.links.len() + 1;
        let last = size - 1;
        let first_link = p.first_link();
        for (weight, square) in self.weights.iter_mut().zip(&scaling.square) {
            *weight = 1.0 / (square + REGULAR);
        }
        self.core.fill(0.0);
        let mut of_common = REGULAR;
        let mut first = 0;
        for (b, block) in p.blocks.iter().enumerate() {
            let (width, signed) = (Sizes::<W, CONE>::width(block), Sizes::<W, CONE>::signed(block));
            let local = Sizes::<W, CONE>::local(block);
            let square = &mut self.inverse[block.inverse as usize..][..local * local];
            let pull = &mut self.pull[first..][..local];
            square.fill(0.0);
            pull.fill(0.0);
            let signs = &p.signs[block.var as usize..][..width];
            let weights = &self.weights[block.row as usize..][..signed];
            for j in 0..width {
                square[j * local + j] = REGULAR;
            }
            for j in 0..signed {
                square[j * local + j] += signs[j] * signs[j] * weights[j];
            }
            let mut stiff = 0.0;
            for (row, factors) in p.rows_of(block, width) {
                let weight = self.weights[row];
                for i in 0..width {
                    let by = weight * factors[i];
                    add(&mut square[i * local..][..width], &factors[..width], by);
                    pull[i] += by * factors[width];
                }
                stiff += weight * factors[width] * factors[width];
            }
            if CONE {
                let cone = &scaling.cones[b];
                let rows = &mut self.cones[3 * first..][..3 * local];
                let weights = &mut self.weights[p.cone_of(block)..][..3];
                write_rows(cone, &p.arms[block.arm as usize..][..2 * width], rows, weights);
                for (row, weight) in rows.chunks_exact(local).zip(weights) {
                    for i in 0..local {
                        add(&mut square[i * local..][..local], row, *weight * row[i]);
                    }
                }
                square[width * local + width] -= cone.eta2;
                square[(width + 1) * local + width + 1] += cone.eta2 + REGULAR;
            }
            decompose(square, local, |k| if k == width { -1.0 } else { 1.0 });
            let pulled = &mut self.own[..local];
            pulled.copy_from_slice(pull);
            substitute(square, pulled);
            of_common += block.count * (stiff - dot(pull, pulled));
            let entries = p.entries_of(block);
            for e in entries {
                self.core[last * size + e.link as usize] -= e.factor * pulled[e.var as usize];
            }
            let share = 1.0 / block.count;
            for (n, e) in entries.iter().enumerate() {
                let column = &mut self.own[..local];
                column.fill(0.0);
                column[e.var as usize] = share * e.factor;
                substitute(square, column);
                for (m, f) in entries[..=n].iter().enumerate() {
                    let (low, high) = (e.link.min(f.link) as usize, e.link.max(f.link) as usize);
                    // Two entries of one link meet twice.
                    let twice = if low == high && m < n { 2.0 } else { 1.0 };
                    self.core[high * size + low] -= twice * f.factor * column[f.var as usize];
                }
            }
            first += local;
        }
        for (l, link) in p.links.iter().enumerate() {
            self.core[l * size + l] -= link.count / self.weights[first_link + l];
            self.core[last * size + l] += link.count * link.common;
        }
        self.core[last * size + last] += of_common;
        decompose(&mut self.core, size, |k| if k < last { -1.0 } else { 1.0 });
    }

    /// Solves accurately enough for a predictor: without refinement, unless there are cones, whose
    /// regularisation it has to compensate.
    pub(super) fn predict(
        &mut self,
        p: &Program,
        scaling: &Scaling,
        bx: &[f64],
        bz: &[f64],
        out: &mut Direction,
    ) {
        if p.shape.cone {
            self.solve(p, scaling, bx, bz, out);
        } else {
            self.once(p, [bx, bz], &Inner::new(), out, &mut Inner::new());
        }
    }

    /// Solves for right sides `bx` and `bz`.
    pub(super) fn solve(
        &mut self,
        p: &Program,
        scaling: &Scaling,
        bx: &[f64],
        bz: &[f64],
        out: &mut Direction,
    ) {
        let enough = PRECISION * (1.0 + largest(bx).max(largest(bz)));
        let mut inner = std::mem::take(&mut self.inner);
        let mut error = std::mem::replace(&mut self.error, Direction { x: vec![], z: vec![] });
        let mut correction =
            std::mem::replace(&mut self.correction, Direction { x: vec![], z: vec![] });
        let mut inner_error = std::mem::take(&mut self.inner_error);
        let mut inner_correction = std::mem::take(&mut self.inner_correction);
        inner_error.fill([0.0; 2]);
        self.once(p, [bx, bz], &inner_error, out, &mut inner);
        let mut before = f64::INFINITY;
        for round in 0..=REFINEMENTS {
            miss(p, scaling, [bx, bz], (out, &inner), (&mut error, &mut inner_error));
            let of_inner = inner_error.iter().fold(0.0_f64, |m, e| m.max(largest(e)));
            let now = largest(&error.x).max(largest(&error.z)).max(of_inner);
            if round > 0 && (now > before || now.is_nan()) {
                add(&mut out.x, &correction.x, -1.0);
                add(&mut out.z, &correction.z, -1.0);
                break;
            }
            if round == REFINEMENTS || now < enough || before < WORTHWHILE * now {
                break;
            }
            before = now;
            let missed: [&[f64]; 2] = [&error.x, &error.z];
            self.once(p, missed, &inner_error, &mut correction, &mut inner_correction);
            add(&mut out.x, &correction.x, 1.0);
            add(&mut out.z, &correction.z, 1.0);
            for (inner, change) in inner.iter_mut().zip(&inner_correction) {
                add(inner, change, 1.0);
            }
        }
        (self.inner, self.error, self.correction) = (inner, error, correction);
        (self.inner_error, self.inner_correction) = (inner_error, inner_correction);
    }

    /// One solution with the precision of the elimination.
    fn once(
        &mut self,
        p: &Program,
        right: [&[f64]; 2],
        binner: &Inner,
        out: &mut Direction,
        inner: &mut Inner,
    ) {
        sized!(p, self.once_sized(p, right, binner, out, inner));
    }

    fn once_sized<const W: usize, const CONE: bool>(
        &mut self,
        p: &Program,
        [bx, bz]: [&[f64]; 2],
        binner: &Inner,
        out: &mut Direction,
        inner: &mut Inner,
    ) {
        let (common, last) = (p.common(), p.links.len());
        let (bz, of_links) = bz.split_at(p.first_link());
        for ((small, b), link) in self.small.iter_mut().zip(of_links).zip(&p.links) {
            *small = link.count * b;
        }
        let mut of_common = bx[common];
        let mut first = 0;
        for (b, block) in p.blocks.iter().enumerate() {
            let (width, signed) = (Sizes::<W, CONE>::width(block), Sizes::<W, CONE>::signed(block));
            let local = Sizes::<W, CONE>::local(block);
            let right = &mut self.right[first..][..local];
            right[..width].copy_from_slice(&bx[block.var as usize..][..width]);
            let signs = &p.signs[block.var as usize..][..width];
            let weights = &self.weights[block.row as usize..][..signed];
            let own = &bz[block.row as usize..][..signed];
            for j in 0..signed {
                right[j] += signs[j] * weights[j] * own[j];
            }
            for (row, factors) in p.rows_of(block, width) {
                let by = self.weights[row] * bz[row];
                add(&mut right[..width], &factors[..width], by);
                of_common += block.count * by * factors[width];
            }
            if CONE {
                right[width..].copy_from_slice(&binner[b]);
                let rows = self.cones[3 * first..][..3 * local].chunks_exact(local);
                for (at, factors) in (p.cone_of(block)..).zip(rows) {
                    add(right, factors, self.weights[at] * bz[at]);
                }
            }
            let own = &mut self.own[..local];
            own.copy_from_slice(right);
            substitute(&self.inverse[block.inverse as usize..][..local * local], own);
            of_common -= block.count * dot(&self.pull[first..][..local], own);
            for e in p.entries_of(block) {
                self.small[e.link as usize] -= e.factor * own[e.var as usize];
            }
            first += local;
        }
        self.small[last] = of_common;
        substitute(&self.core, &mut self.small);
        let y = self.small[last];
        out.x[common] = y;
        let (z, of_links) = out.z.split_at_mut(bz.len());
        of_links.copy_from_slice(&self.small[..last]);
        first = 0;
        for (b, block) in p.blocks.iter().enumerate() {
            let (width, signed) = (Sizes::<W, CONE>::width(block), Sizes::<W, CONE>::signed(block));
            let local = Sizes::<W, CONE>::local(block);
            let x = &mut self.right[first..][..local];
            add(x, &self.pull[first..][..local], -y);
            let share = 1.0 / block.count;
            for e in p.entries_of(block) {
                x[e.var as usize] -= share * e.factor * of_links[e.link as usize];
            }
            substitute(&self.inverse[block.inverse as usize..][..local * local], x);
            out.x[block.var as usize..][..width].copy_from_slice(&x[..width]);
            let signs = &p.signs[block.var as usize..][..width];
            let weights = &self.weights[block.row as usize..][..signed];
            let (bz_own, own) =
                (&bz[block.row as usize..][..signed], &mut z[block.row as usize..][..signed]);
            for j in 0..signed {
                own[j] = (signs[j] * x[j] - bz_own[j]) * weights[j];
            }
            for (row, factors) in p.rows_of(block, width) {
                let has = dot(&factors[..width], &x[..width]) + factors[width] * y;
                z[row] = (has - bz[row]) * self.weights[row];
            }
            if CONE {
                inner[b].copy_from_slice(&x[width..]);
                let rows = self.cones[3 * first..][..3 * local].chunks_exact(local);
                for (at, factors) in (p.cone_of(block)..).zip(rows) {
                    z[at] = (dot(factors, x) - bz[at]) * self.weights[at];
                }
            }
            first += local;
        }
    }
}

/// Residual of a solution.
fn miss(
    p: &Program,
    scaling: &Scaling,
    [bx, bz]: [&[f64]; 2],
    (found, inner): (&Direction, &Inner),
    (error, inner_error): (&mut Direction, &mut Inner),
) {
    p.times_transposed(&found.z, &mut error.x);
    for ((e, b), x) in error.x.iter_mut().zip(bx).zip(&found.x) {
        *e = b - *e - REGULAR * x;
    }
    p.times(&found.x, &mut error.z);
    let rows = bz.iter().zip(&scaling.square).zip(&found.z);
    for (e, ((b, square), z)) in error.z.iter_mut().zip(rows) {
        *e = b - *e + (square + REGULAR) * z;
    }
    for (b, (block, cone)) in p.blocks.iter().zip(&scaling.cones).enumerate() {
        let at = p.cone_of(block);
        let z = &found.z[at..at + 3];
        let [through_v, through_u] = inner[b];
        for (i, error) in error.z[at..at + 3].iter_mut().enumerate() {
            let square = cone.diagonal(i) * z[i] + cone.v[i] * through_v + cone.u[i] * through_u;
            *error += cone.eta2 * square;
        }
        // The last is regularised the other way round.
        error.z[at + 2] -= 2.0 * REGULAR * z[2];
        inner_error[b] =
            [cone.eta2 * (dot(&cone.v, z) + through_v), cone.eta2 * (dot(&cone.u, z) - through_u)];
    }
}

/// Factors of a cone's rows, its inner unknowns last, and the weights of its diagonal.
fn write_rows(cone: &Cone, arms: &[f64], rows: &mut [f64], weights: &mut [f64]) {
    let width = arms.len() / 2;
    for (i, row) in rows.chunks_exact_mut(width + 2).enumerate() {
        match arms.chunks_exact(width).nth(i) {
            Some(arm) => row[..width].copy_from_slice(arm),
            None => row[..width].fill(0.0),
        }
        row[width] = -cone.eta2 * cone.v[i];
        row[width + 1] = -cone.eta2 * cone.u[i];
        weights[i] = 1.0 / (cone.eta2 * cone.diagonal(i) + REGULAR);
    }
}

/// L·D·Lᵀ of a symmetric matrix whose lower half is given, with the signs that its pivots have. On
/// the diagonal are the inverse pivots.
#[inline(always)]
#[expect(clippy::inline_always, reason = "sizes are known only where it is called")]
fn decompose(a: &mut [f64], n: usize, sign: impl Fn(usize) -> f64) {
    for k in 0..n {
        let (done, rest) = a.split_at_mut(k * n);
        let row = &mut rest[..n];
        for (i, of_i) in done.chunks_exact(n).enumerate() {
            row[i] -= dot(&row[..i], &of_i[..i]);
        }
        let mut pivot = row[k];
        for (i, of_i) in done.chunks_exact(n).enumerate() {
            let scaled = row[i] * of_i[i];
            pivot -= scaled * row[i];
            row[i] = scaled;
        }
        let sign = sign(k);
        row[k] = 1.0 / if sign * pivot > TINY { pivot } else { sign * INSTEAD };
    }
}

/// Solves with that.
#[inline(always)]
#[expect(clippy::inline_always, reason = "sizes are known only where it is called")]
fn substitute(a: &[f64], b: &mut [f64]) {
    let n = b.len();
    for k in 1..n {
        b[k] -= dot(&a[k * n..][..k], &b[..k]);
    }
    for k in 0..n {
        b[k] *= a[k * n + k];
    }
    for k in (1..n).rev() {
        let of_k = b[k];
        add(&mut b[..k], &a[k * n..][..k], -of_k);
    }
}
