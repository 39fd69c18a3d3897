//! Cone programs of many small blocks that meet in a few rows.
//!
//! Minimise `c·x` so that what is left of every row's bound, `s = h − G·x`, is not negative, or lies in a
//! second-order cone. Variables come in blocks (a job and its parts of the time); rows belong to one
//! block or link all of them (GPUs of a kind), and one free variable is common to all. A step then
//! costs one small system for each block and one of the size of the links: linear in the blocks.
//!
//! The method is that of Domahidi, Chu and Boyd (*ECOS: an SOCP solver for embedded systems*, 2013): a
//! primal-dual interior point with Nesterov-Todd scaling and Mehrotra's predictor and corrector on the
//! self-dual embedding. Start, step lengths, regularisation and stopping are as published there,
//! because where many answers are best, they decide which one is found, and studies that were made
//! with that solver can only be repeated with the same one.
//!
//! Blocks that are equal stay equal, so they are given once, with their number.

mod second_order;
mod system;

use second_order::Scaling;
use system::System;

/// What the blocks of a program have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows of each block, apart from the signs of its variables.
    pub rows: usize,
    /// Whether each block has a second-order cone; its last variable is then free, all others are not
    /// negative.
    pub cone: bool,
}

impl Shape {
    /// Unknowns within the cone of a block.
    fn inner(self) -> usize {
        if self.cone { 2 } else { 0 }
    }
}

/// A row that links blocks: `Σ + common · y ≤ bound`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// How many equal rows this stands for.
    pub count: f64,
    /// Factor of the common variable.
    pub common: f64,
    /// What it may come to.
    pub bound: f64,
}

/// A block's place in the arrays.
#[derive(Clone, Copy, Debug)]
struct Block {
    count: f64,
    var: u32,
    width: u32,
    row: u32,
    factor: u32,
    arm: u32,
    entry: u32,
    entries: u32,
    inverse: u32,
}

/// A variable of a block in a link.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Its place in the block.
    var: u32,
    link: u32,
    /// Once the program is balanced: of all pairs of such a variable and such a row together.
    factor: f64,
}

/// Sizes of a block, known when this is compiled: `W` variables, or any number if that is 0, and a cone or
/// none. Loops over them then vanish.
struct Sizes<const W: usize, const CONE: bool>;

impl<const W: usize, const CONE: bool> Sizes<W, CONE> {
    #[inline(always)]
    fn width(block: &Block) -> usize {
        if W == 0 { block.width as usize } else { W }
    }

    /// Variables that are not negative: the first of them.
    #[inline(always)]
    fn signed(block: &Block) -> usize {
        Self::width(block) - usize::from(CONE)
    }

    /// Variables with those within the cone.
    #[inline(always)]
    fn local(block: &Block) -> usize {
        Self::width(block) + if CONE { 2 } else { 0 }
    }
}

/// Calls a function for the sizes of a program.
macro_rules! sized {
    ($program:expr, $object:ident . $name:ident ( $($argument:expr),* )) => {
        match ($program.width, $program.shape.cone) {
            (1, false) => $object.$name::<1, false>($($argument),*),
            (2, false) => $object.$name::<2, false>($($argument),*),
            (3, false) => $object.$name::<3, false>($($argument),*),
            (4, true) => $object.$name::<4, true>($($argument),*),
            (_, false) => $object.$name::<0, false>($($argument),*),
            (_, true) => $object.$name::<0, true>($($argument),*),
        }
    };
}
use sized;

/// A program under construction: blocks one after the other, each with its rows, cone and links.
#[derive(Clone, Debug)]
pub struct Program {
    shape: Shape,
    links: Vec<Link>,
    blocks: Vec<Block>,
    costs: Vec<f64>,
    common_cost: f64,
    /// Factor of each variable in the row that keeps it from being negative.
    signs: Vec<f64>,
    /// Factors of the rows of the blocks, that of the common variable last in each row.
    factors: Vec<f64>,
    /// Factors of the first two rows of each cone; the third is constant.
    arms: Vec<f64>,
    entries: Vec<Entry>,
    pairs: Vec<f64>,
    bounds: Vec<f64>,
    squares: usize,
    /// Variables of each block, if all have as many.
    width: usize,
}

/// An answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Variables, block by block, then the common one.
    pub values: Vec<f64>,
    /// What is left of each row of the blocks, and what it costs: `rows` for each block.
    pub rows: Vec<(f64, f64)>,
    /// Whether it is as precise as was asked for; otherwise to about four digits.
    pub exact: bool,
}

const MAX_STEPS: usize = 100;
/// As precise as the study's solver.
pub const EXACT: f64 = 1e-8;
/// What is taken if the numbers get no better: feasibility and gap.
const ROUGHLY: [f64; 2] = [1e-4, 5e-5];
/// How much of the way to the edge is gone.
const BOLDNESS: f64 = 0.99;
const SHORTEST_STEP: f64 = 1e-6;
const LONGEST_STEP: f64 = 0.999;
const LEAST_CENTRING: f64 = 1e-4;
/// Growth of the residual by which a step is known to be bad.
const BAD_STEP: f64 = 500.0;
const BALANCINGS: usize = 3;

impl Program {
    /// A program without blocks. The common variable costs `common_cost`.
    pub fn new(shape: Shape, links: Vec<Link>, common_cost: f64) -> Self {
        Self {
            shape,
            links,
            blocks: Vec::new(),
            costs: Vec::new(),
            common_cost,
            signs: Vec::new(),
            factors: Vec::new(),
            arms: Vec::new(),
            entries: Vec::new(),
            pairs: Vec::new(),
            bounds: Vec::new(),
            squares: 0,
            width: 0,
        }
    }

    /// Adds a block that stands for `count` equal ones, with the cost of each variable.
    pub fn block(&mut self, count: f64, costs: &[f64]) {
        let width = costs.len();
        let signed = width - usize::from(self.shape.cone);
        let first = self.blocks.is_empty();
        self.width = if first || self.width == width { width } else { 0 };
        self.blocks.push(Block {
            count,
            var: self.costs.len() as u32,
            width: width as u32,
            row: self.bounds.len() as u32,
            factor: self.factors.len() as u32,
            arm: self.arms.len() as u32,
            entry: self.entries.len() as u32,
            entries: self.entries.len() as u32,
            inverse: self.squares as u32,
        });
        self.squares += (width + self.shape.inner()).pow(2);
        self.costs.extend_from_slice(costs);
        self.signs.extend((0..width).map(|j| if j < signed { -1.0 } else { 0.0 }));
        self.bounds.resize(self.bounds.len() + signed, 0.0);
    }

    /// Adds a row of the last block: `factors · x + common · y ≤ bound`.
    pub fn row(&mut self, factors: &[f64], common: f64, bound: f64) {
        self.factors.extend_from_slice(factors);
        self.factors.push(common);
        self.bounds.push(bound);
    }

    /// Adds the cone of the last block: `a · x + last ≥ ‖(a · x − last, 2)‖`, which says that `last` is
    /// at least 1 ÷ (a · x).
    pub fn inverse(&mut self, factors: &[f64]) {
        for last in [-1.0, 1.0] {
            self.arms.extend(factors.iter().map(|a| -a));
            self.arms.push(last);
        }
        self.bounds.extend([0.0, 0.0, 2.0]);
    }

    /// Enters a variable of the last block in a link. `pairs` is the number of pairs of such a variable
    /// and such a link among those that both stand for.
    pub fn link(&mut self, var: usize, link: usize, factor: f64, pairs: f64) {
        self.entries.push(Entry { var: var as u32, link: link as u32, factor });
        self.pairs.push(pairs);
        if let Some(block) = self.blocks.last_mut() {
            block.entries = self.entries.len() as u32;
        }
    }

    /// The best values; `None` if there are none, or if the search lost its way. `precision` of rows and
    /// cost, relative to their size; [`EXACT`] is about as good as it gets.
    pub fn solve(mut self, precision: f64) -> Option<Answer> {
        self.bounds.extend(self.links.iter().map(|l| l.bound));
        self.costs.push(self.common_cost);
        let numbers = [&self.costs, &self.factors, &self.arms, &self.bounds];
        let links = self.links.iter().flat_map(|l| [l.count, l.common]);
        let entries = self.entries.iter().map(|e| e.factor);
        let all = numbers.into_iter().flatten().copied().chain(links).chain(entries);
        if self.blocks.is_empty() || !all.into_iter().all(f64::is_finite) {
            return None;
        }
        Search::new(self).run(precision)
    }

    /// Whether its blocks have cones.
    pub fn has_cones(&self) -> bool {
        self.shape.cone
    }

    fn common(&self) -> usize {
        self.costs.len() - 1
    }

    fn first_link(&self) -> usize {
        self.bounds.len() - self.links.len()
    }

    fn signed(&self, block: &Block) -> usize {
        block.width as usize - usize::from(self.shape.cone)
    }

    /// Rows of a block with their factors, the common variable's last.
    #[inline(always)]
    fn rows_of(&self, block: &Block, width: usize) -> impl Iterator<Item = (usize, &[f64])> {
        let stride = width + 1;
        let factors = &self.factors[block.factor as usize..][..stride * self.shape.rows];
        let first = block.row as usize + width - usize::from(self.shape.cone);
        (first..).zip(factors.chunks_exact(stride))
    }

    /// First row of a block's cone.
    fn cone_of(&self, block: &Block) -> usize {
        block.row as usize + self.signed(block) + self.shape.rows
    }

    #[inline(always)]
    fn entries_of(&self, block: &Block) -> &[Entry] {
        &self.entries[block.entry as usize..block.entries as usize]
    }

    /// Divides rows and variables so that the largest factor in each is about 1. Returns the divisors
    /// of variables and rows.
    fn balance(&mut self) -> (Vec<f64>, Vec<f64>) {
        let (mut vars, mut rows) = (vec![1.0; self.costs.len()], vec![1.0; self.bounds.len()]);
        for _ in 0..BALANCINGS {
            let (by_var, by_row) = self.largest();
            let root = |v: &f64| if *v < 1e-6 { 1.0 } else { v.sqrt() };
            let by_var: Vec<f64> = by_var.iter().map(root).collect();
            let by_row: Vec<f64> = by_row.iter().map(root).collect();
            self.divide(&by_var, &by_row);
            vars.iter_mut().zip(&by_var).for_each(|(v, d)| *v *= d);
            rows.iter_mut().zip(&by_row).for_each(|(v, d)| *v *= d);
        }
        for (entry, pairs) in self.entries.iter_mut().zip(&self.pairs) {
            entry.factor *= pairs;
        }
        self.costs.iter_mut().zip(&vars).for_each(|(c, d)| *c /= d);
        self.bounds.iter_mut().zip(&rows).for_each(|(h, d)| *h /= d);
        (vars, rows)
    }

    /// The largest factor of each variable and row; the rows of a cone count together.
    fn largest(&self) -> (Vec<f64>, Vec<f64>) {
        let (mut vars, mut rows) = (vec![0.0_f64; self.costs.len()], vec![0.0; self.bounds.len()]);
        let (common, first_link) = (self.common(), self.first_link());
        let mut note = |var: usize, row: usize, factor: f64| {
            vars[var] = vars[var].max(factor.abs());
            rows[row] = f64::max(rows[row], factor.abs());
        };
        for block in &self.blocks {
            let (first, width) = (block.var as usize, block.width as usize);
            for j in 0..self.signed(block) {
                note(first + j, block.row as usize + j, self.signs[first + j]);
            }
            for (row, factors) in self.rows_of(block, width) {
                for (j, factor) in factors[..width].iter().enumerate() {
                    note(first + j, row, *factor);
                }
                note(common, row, factors[width]);
            }
            if self.shape.cone {
                for (i, factor) in self.arms[block.arm as usize..][..2 * width].iter().enumerate() {
                    note(first + i % width, self.cone_of(block) + i / width, *factor);
                }
            }
            for entry in self.entries_of(block) {
                note(first + entry.var as usize, first_link + entry.link as usize, entry.factor);
            }
        }
        for (l, link) in self.links.iter().enumerate() {
            note(common, first_link + l, link.common);
        }
        if self.shape.cone {
            for block in &self.blocks {
                let rows = &mut rows[self.cone_of(block)..][..3];
                let sum = rows.iter().sum();
                rows.fill(sum);
            }
        }
        (vars, rows)
    }

    fn divide(&mut self, vars: &[f64], rows: &[f64]) {
        let (common, first_link, shape) = (self.common(), self.first_link(), self.shape);
        for block in &self.blocks {
            let (first, width) = (block.var as usize, block.width as usize);
            let signed = width - usize::from(shape.cone);
            let vars_of = &vars[first..][..width];
            let rows_of = &rows[block.row as usize..];
            for j in 0..signed {
                self.signs[first + j] /= rows_of[j] * vars_of[j];
            }
            let of_block = &mut self.factors[block.factor as usize..][..(width + 1) * shape.rows];
            for (factors, row) in of_block.chunks_exact_mut(width + 1).zip(&rows_of[signed..]) {
                for (factor, var) in factors.iter_mut().zip(vars_of.iter().chain([&vars[common]])) {
                    *factor /= row * var;
                }
            }
            if shape.cone {
                let row = rows_of[signed + shape.rows];
                let arms = &mut self.arms[block.arm as usize..][..2 * width];
                for (factor, var) in arms.iter_mut().zip(vars_of.iter().cycle()) {
                    *factor /= row * var;
                }
            }
            for entry in &mut self.entries[block.entry as usize..block.entries as usize] {
                let row = rows[first_link + entry.link as usize];
                entry.factor /= row * vars_of[entry.var as usize];
            }
        }
        for (l, link) in self.links.iter_mut().enumerate() {
            link.common /= rows[first_link + l] * vars[common];
        }
    }

    /// `G · x`.
    fn times(&self, x: &[f64], out: &mut [f64]) {
        sized!(self, self.times_sized(x, out));
    }

    fn times_sized<const W: usize, const CONE: bool>(&self, x: &[f64], out: &mut [f64]) {
        let y = x[self.common()];
        let (out, links) = out.split_at_mut(self.first_link());
        links.fill(0.0);
        for block in &self.blocks {
            let (width, signed) = (Sizes::<W, CONE>::width(block), Sizes::<W, CONE>::signed(block));
            let x = &x[block.var as usize..][..width];
            let signs = &self.signs[block.var as usize..][..width];
            let own = &mut out[block.row as usize..][..signed];
            for j in 0..signed {
                own[j] = signs[j] * x[j];
            }
            for (row, factors) in self.rows_of(block, width) {
                out[row] = dot(&factors[..width], x) + factors[width] * y;
            }
            if CONE {
                let (one, two) = self.arms[block.arm as usize..][..2 * width].split_at(width);
                let cone = &mut out[self.cone_of(block)..][..3];
                (cone[0], cone[1], cone[2]) = (dot(one, x), dot(two, x), 0.0);
            }
            for e in self.entries_of(block) {
                links[e.link as usize] += e.factor * x[e.var as usize];
            }
        }
        for (out, link) in links.iter_mut().zip(&self.links) {
            *out = *out / link.count + link.common * y;
        }
    }

    /// `Gᵀ · z`.
    fn times_transposed(&self, z: &[f64], out: &mut [f64]) {
        sized!(self, self.times_transposed_sized(z, out));
    }

    fn times_transposed_sized<const W: usize, const CONE: bool>(&self, z: &[f64], out: &mut [f64]) {
        let (z, links) = z.split_at(self.first_link());
        let mut y = 0.0;
        for (link, z) in self.links.iter().zip(links) {
            y += link.count * link.common * z;
        }
        for block in &self.blocks {
            let (width, signed) = (Sizes::<W, CONE>::width(block), Sizes::<W, CONE>::signed(block));
            let out = &mut out[block.var as usize..][..width];
            out.fill(0.0);
            for e in self.entries_of(block) {
                out[e.var as usize] += e.factor * links[e.link as usize];
            }
            let share = 1.0 / block.count;
            out.iter_mut().for_each(|o| *o *= share);
            let signs = &self.signs[block.var as usize..][..width];
            let own = &z[block.row as usize..][..signed];
            for j in 0..signed {
                out[j] += signs[j] * own[j];
            }
            for (row, factors) in self.rows_of(block, width) {
                add(out, &factors[..width], z[row]);
                y += block.count * factors[width] * z[row];
            }
            if CONE {
                let (one, two) = self.arms[block.arm as usize..][..2 * width].split_at(width);
                let cone = &z[self.cone_of(block)..][..3];
                add(out, one, cone[0]);
                add(out, two, cone[1]);
            }
        }
        out[self.common()] = y;
    }
}

/// A point of the embedding: `x`, `s` and `z` are to be divided by `tau`.
#[derive(Clone, Debug)]
struct Point {
    x: Vec<f64>,
    s: Vec<f64>,
    z: Vec<f64>,
    kappa: f64,
    tau: f64,
}

/// How good a point is.
#[derive(Clone, Copy, Debug)]
struct Quality {
    gap: f64,
    relative_gap: f64,
    mu: f64,
    primal: f64,
    dual: f64,
    /// By how much the point fails to prove that there is no answer; NaN if it does not try.
    no_answer: f64,
    no_bound: f64,
    cost: f64,
    worth: f64,
    kappa: f64,
    tau: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Best,
    None,
}

impl Quality {
    fn verdict(&self, feasible: f64, gap: f64) -> Option<Verdict> {
        let sane = self.cost < 0.0 || self.worth >= -gap;
        let close = self.gap < gap || self.relative_gap < gap;
        if sane && self.primal < feasible && self.dual < feasible && close {
            return Some(Verdict::Best);
        }
        let open = self.tau < self.kappa;
        let vanished = self.tau < EXACT && self.kappa < EXACT;
        let unbounded = self.no_bound < feasible && open;
        let impossible = (self.no_answer < feasible && open)
            || (vanished && self.no_answer < EXACT);
        (unbounded || impossible).then_some(Verdict::None)
    }

    /// Whether it is better than the best so far, in everything that counts.
    fn beats(&self, best: &Self) -> bool {
        let less = |a: f64, b: f64| a > 0.0 && a < b;
        let closer = less(self.gap, best.gap) && less(self.mu, best.mu);
        if !self.no_answer.is_nan() && self.kappa > self.tau {
            return closer && (best.no_answer.is_nan() || less(self.no_answer, best.primal));
        }
        let open = less(self.kappa / self.tau, best.kappa / best.tau);
        closer && less(self.primal, best.primal) && less(self.dual, best.dual) && open
    }
}

/// A direction.
#[derive(Debug)]
struct Direction {
    x: Vec<f64>,
    z: Vec<f64>,
}

struct Search {
    program: Program,
    var_divisors: Vec<f64>,
    row_divisors: Vec<f64>,
    /// How many variables and rows each of ours stands for.
    var_counts: Vec<f64>,
    row_counts: Vec<f64>,
    /// Signs and cones of the whole program.
    degree: f64,
    cost_size: f64,
    bound_size: f64,
}

impl Search {
    fn new(mut program: Program) -> Self {
        let (var_divisors, row_divisors) = program.balance();
        let mut var_counts = vec![1.0; program.costs.len()];
        let mut row_counts = vec![1.0; program.bounds.len()];
        let mut degree = program.links.iter().map(|l| l.count).sum::<f64>();
        for block in &program.blocks {
            let Shape { rows, cone } = program.shape;
            let signs = program.signed(block) + rows;
            var_counts[block.var as usize..][..block.width as usize].fill(block.count);
            let rows = signs + if cone { 3 } else { 0 };
            row_counts[block.row as usize..][..rows].fill(block.count);
            degree += (signs + usize::from(cone)) as f64 * block.count;
        }
        let first_link = program.first_link();
        for (count, link) in row_counts[first_link..].iter_mut().zip(&program.links) {
            *count = link.count;
        }
        let cost_size = norm(&program.costs, &var_counts).max(1.0);
        let bound_size = norm(&program.bounds, &row_counts).max(1.0);
        Self {
            program,
            var_divisors,
            row_divisors,
            var_counts,
            row_counts,
            degree,
            cost_size,
            bound_size,
        }
    }

    fn run(&self, precision: f64) -> Option<Answer> {
        let p = &self.program;
        let (vars, rows) = (p.costs.len(), p.bounds.len());
        let mut system = System::new(p);
        let mut scaling = Scaling::new(p);
        let mut point = self.start(&mut system, &scaling)?;
        let minus_costs: Vec<f64> = p.costs.iter().map(|c| -c).collect();
        let mut best: Option<(Quality, Point)> = None;
        let mut before = f64::NAN;
        let mut step = 0.0;
        let (mut rx, mut rz) = (vec![0.0; vars], vec![0.0; rows]);
        let mut fixed = Direction { x: vec![0.0; vars], z: vec![0.0; rows] };
        let mut ahead = Direction { x: vec![0.0; vars], z: vec![0.0; rows] };
        let mut right = vec![0.0; rows];
        let (mut scaled_s, mut scaled_z) = (vec![0.0; rows], vec![0.0; rows]);
        let mut lambda = vec![0.0; rows];
        let mut divided = vec![0.0; rows];
        for round in 0..=MAX_STEPS {
            let quality = self.quality(&point, &mut rx, &mut rz);
            if round > 0 && (quality.primal > BAD_STEP * before || quality.gap < 0.0) {
                return self.roughly(best);
            }
            before = quality.primal;
            match quality.verdict(precision, precision) {
                Some(Verdict::Best) => return Some(self.answer(&point, true)),
                Some(Verdict::None) => return None,
                None => {}
            }
            let stuck = round > 0 && step <= SHORTEST_STEP * BOLDNESS;
            let lost = round == MAX_STEPS || quality.cost.is_nan();
            let better = best.as_ref().is_none_or(|(b, _)| quality.beats(b));
            if better && !stuck {
                match &mut best {
                    Some((q, p)) => (*q, _) = (quality, p.clone_from(&point)),
                    none => *none = Some((quality, point.clone())),
                }
            }
            if stuck || lost || !scaling.update(p, &point.s, &point.z, &mut lambda) {
                return self.roughly(best);
            }
            system.factor(p, &scaling);
            system.solve(p, &scaling, &minus_costs, &p.bounds, &mut fixed);

            // Predictor: straight to the answer.
            for (right, (s, rz)) in right.iter_mut().zip(point.s.iter().zip(&rz)) {
                *right = s - rz;
            }
            system.predict(p, &scaling, &rx, &right, &mut ahead);
            let Point { kappa, tau, .. } = point;
            let slope = kappa / tau - self.worth(&fixed);
            let missing = kappa + self.worth_at(&point);
            let d_tau = (missing - kappa + self.worth(&ahead)) / slope;
            add(&mut ahead.z, &fixed.z, d_tau);
            scaling.times(p, &ahead.z, &mut scaled_z);
            for i in 0..rows {
                scaled_s[i] = -scaled_z[i] - lambda[i];
            }
            let d_kappa = -kappa - kappa / tau * d_tau;
            let reach = |s: &[f64], z: &[f64], d_tau: f64, d_kappa: f64| {
                let ends = [-tau / d_tau, -kappa / d_kappa].into_iter().filter(|a| *a > 0.0);
                let reach = scaling.reach(p, &lambda, s, z);
                ends.fold(reach, f64::min).clamp(SHORTEST_STEP, LONGEST_STEP)
            };
            let there = reach(&scaled_s, &scaled_z, d_tau, d_kappa);
            let centring = (1.0 - there).powi(3).clamp(LEAST_CENTRING, 1.0);

            // Corrector: bent back towards the centre.
            let mu = centring * quality.mu;
            scaling.corrected(p, &lambda, &scaled_s, &scaled_z, mu, &mut divided);
            scaling.times(p, &divided, &mut right);
            for (right, rz) in right.iter_mut().zip(&rz) {
                *right -= (1.0 - centring) * rz;
            }
            rx.iter_mut().for_each(|r| *r *= 1.0 - centring);
            system.solve(p, &scaling, &rx, &right, &mut ahead);
            let product = kappa * tau + d_kappa * d_tau - mu;
            let d_tau = ((1.0 - centring) * missing - product / tau + self.worth(&ahead)) / slope;
            add(&mut ahead.x, &fixed.x, d_tau);
            add(&mut ahead.z, &fixed.z, d_tau);
            scaling.times(p, &ahead.z, &mut scaled_z);
            for i in 0..rows {
                scaled_s[i] = -(divided[i] + scaled_z[i]);
            }
            let d_kappa = -(product + kappa * d_tau) / tau;
            step = BOLDNESS * reach(&scaled_s, &scaled_z, d_tau, d_kappa);
            scaling.times(p, &scaled_s, &mut right);
            add(&mut point.x, &ahead.x, step);
            add(&mut point.z, &ahead.z, step);
            add(&mut point.s, &right, step);
            point.kappa += step * d_kappa;
            point.tau += step * d_tau;
        }
        None
    }

    /// The point nearest to all rows, and the smallest duals, both brought inside the cones.
    fn start(&self, system: &mut System, plain: &Scaling) -> Option<Point> {
        let p = &self.program;
        let (vars, rows) = (p.costs.len(), p.bounds.len());
        system.factor(p, plain);
        let mut found = Direction { x: vec![0.0; vars], z: vec![0.0; rows] };
        system.solve(p, plain, &vec![0.0; vars], &p.bounds, &mut found);
        let x = found.x.clone();
        let mut s: Vec<f64> = found.z.iter().map(|z| -z).collect();
        plain.bring_inside(p, &mut s);
        let minus_costs: Vec<f64> = p.costs.iter().map(|c| -c).collect();
        system.solve(p, plain, &minus_costs, &vec![0.0; rows], &mut found);
        let mut z = found.z;
        plain.bring_inside(p, &mut z);
        let finite = |v: &[f64]| v.iter().all(|x| x.is_finite());
        let sane = finite(&x) && finite(&s) && finite(&z);
        sane.then_some(Point { x, s, z, kappa: 1.0, tau: 1.0 })
    }

    /// `c · x + h · z`.
    fn worth(&self, d: &Direction) -> f64 {
        let Program { costs, bounds, .. } = &self.program;
        weighed(&self.var_counts, costs, &d.x) + weighed(&self.row_counts, bounds, &d.z)
    }

    fn worth_at(&self, p: &Point) -> f64 {
        let Program { costs, bounds, .. } = &self.program;
        weighed(&self.var_counts, costs, &p.x) + weighed(&self.row_counts, bounds, &p.z)
    }

    fn quality(&self, point: &Point, rx: &mut [f64], rz: &mut [f64]) -> Quality {
        let p = &self.program;
        let (by_var, by_row) = (&self.var_counts, &self.row_counts);
        let Point { x, s, z, kappa, tau } = point;
        p.times_transposed(z, rx);
        rx.iter_mut().for_each(|r| *r = -*r);
        let dual_open = norm(rx, by_var);
        add(rx, &p.costs, -tau);
        p.times(x, rz);
        add(rz, s, 1.0);
        let primal_open = norm(rz, by_row);
        add(rz, &p.bounds, -tau);
        let cost = weighed(by_var, &p.costs, x);
        let worth = -weighed(by_row, &p.bounds, z);
        let (nx, ns, nz) = (norm(x, by_var), norm(s, by_row), norm(z, by_row));
        let gap = weighed(by_row, s, z);
        let relative_gap = if cost / tau < 0.0 {
            -gap / (cost / tau)
        } else if worth / tau > 0.0 {
            gap / (worth / tau)
        } else {
            f64::NAN
        };
        let if_below = |v: f64, then: f64| if v < -EXACT { then } else { f64::NAN };
        Quality {
            gap,
            relative_gap,
            mu: (gap + kappa * tau) / (self.degree + 1.0),
            primal: norm(rz, by_row) / (self.bound_size + nx + ns).max(1.0) / tau,
            dual: norm(rx, by_var) / (self.cost_size + nz).max(1.0) / tau,
            no_answer: if_below(-worth / nz.max(1.0), dual_open / nz.max(1.0)),
            no_bound: if_below(cost / nx.max(1.0), primal_open / (nx + ns).max(1.0)),
            cost,
            worth,
            kappa: *kappa,
            tau: *tau,
        }
    }

    /// What is left when the numbers get no better.
    fn roughly(&self, best: Option<(Quality, Point)>) -> Option<Answer> {
        let (quality, point) = best?;
        let verdict = quality.verdict(ROUGHLY[0], ROUGHLY[1]);
        (verdict == Some(Verdict::Best)).then(|| self.answer(&point, false))
    }

    fn answer(&self, point: &Point, exact: bool) -> Answer {
        let p = &self.program;
        let value = |(x, d): (&f64, &f64)| x / (d * point.tau);
        let values = point.x.iter().zip(&self.var_divisors).map(value).collect();
        let row = |row: usize| {
            let (s, z, d) = (point.s[row], point.z[row], self.row_divisors[row]);
            (s * d / point.tau, z / (d * point.tau))
        };
        let rows = p.blocks.iter().flat_map(|b| p.rows_of(b, b.width as usize).map(|(i, _)| row(i)));
        Answer { values, rows: rows.collect(), exact }
    }
}

#[inline(always)]
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let (mut a, mut b) = (a, b);
    let mut lanes = [0.0; 4];
    // Four sums at once, because one would wait for itself.
    while let ([a0, a1, a2, a3, rest_a @ ..], [b0, b1, b2, b3, rest_b @ ..]) = (a, b) {
        lanes[0] += a0 * b0;
        lanes[1] += a1 * b1;
        lanes[2] += a2 * b2;
        lanes[3] += a3 * b3;
        (a, b) = (rest_a, rest_b);
    }
    let rest: f64 = a.iter().zip(b).map(|(x, y)| x * y).sum();
    (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]) + rest
}

fn weighed(weights: &[f64], a: &[f64], b: &[f64]) -> f64 {
    weights.iter().zip(a.iter().zip(b)).map(|(w, (x, y))| w * x * y).sum()
}

fn norm(a: &[f64], weights: &[f64]) -> f64 {
    weighed(weights, a, a).sqrt()
}

/// `a += b · by`, as long as the shorter of the two.
fn add(a: &mut [f64], b: &[f64], by: f64) {
    a.iter_mut().zip(b).for_each(|(a, b)| *a += b * by);
}

/// The largest of the absolute values; NaN if one is.
fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |m, v| if v.abs() > m || v.is_nan() { v.abs() } else { m })
}
