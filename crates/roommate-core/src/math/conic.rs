//! Cone programs of many small blocks that are coupled by a few rows.
//!
//! Minimise `c·x` so that the slack of every row, `s = h − G·x`, is not negative, or lies in a
//! second-order cone. Variables come in blocks (a job and its shares of time); rows belong to one
//! block or link all of them (GPUs of one model), and one free variable is common to all. A step
//! then costs one small system for each block and one of the size of the links: linear in the
//! blocks.
//!
//! The method is that of Domahidi, Chu and Boyd (*ECOS: an SOCP solver for embedded systems*,
//! 2013): a primal-dual interior point with Nesterov-Todd scaling and Mehrotra's predictor and
//! corrector on the self-dual embedding. Start, step lengths, regularisation and stopping are as
//! published there, because where many solutions are optimal they decide which one is found, and
//! studies that were made with that solver can only be repeated with the same one.
//!
//! Equal blocks have equal solutions, so they are given once, with their number.

mod search;
mod second_order;
mod system;

use search::Search;

/// What the blocks of a program have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows of each block, apart from the signs of its variables.
    pub rows: usize,
    /// Whether each block has a second-order cone; its last variable is then free, all others are
    /// not negative.
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
    /// Coefficient of the common variable.
    pub common: f64,
    /// Upper bound of the row.
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
    /// After balancing: the total over all pairs of such a variable and such a row.
    factor: f64,
}

/// Sizes of a block, known at compile time: `W` variables, or any number if that is 0, and a cone
/// or none, so that loops over them are unrolled.
struct Sizes<const W: usize, const CONE: bool>;

impl<const W: usize, const CONE: bool> Sizes<W, CONE> {
    #[inline]
    fn width(block: &Block) -> usize {
        if W == 0 { block.width as usize } else { W }
    }

    /// Variables that are not negative: the first of them.
    #[inline]
    fn signed(block: &Block) -> usize {
        Self::width(block) - usize::from(CONE)
    }

    /// Number of variables including those within the cone.
    #[inline]
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

/// The solution.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Variables, block by block, then the common one.
    pub values: Vec<f64>,
    /// Slack and dual of each row of the blocks: `rows` for each block.
    pub rows: Vec<(f64, f64)>,
    /// Dual of each link.
    pub links: Vec<f64>,
    /// Whether it has the requested precision; otherwise about four digits.
    pub exact: bool,
}

/// The precision of the study's solver.
pub const EXACT: f64 = 1e-8;
/// Passes of [`Program::balance`].
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

    /// Reserves memory for this many blocks of this many variables, each in one link.
    pub fn reserve(&mut self, blocks: usize, width: usize) {
        self.blocks.reserve(blocks);
        self.costs.reserve(blocks * width + 1);
        self.signs.reserve(blocks * width);
        self.factors.reserve(blocks * self.shape.rows * (width + 1));
        self.bounds.reserve(blocks * (width + self.shape.rows + 3) + self.links.len());
        self.entries.reserve(blocks * width);
        self.pairs.reserve(blocks * width);
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

    /// Adds the cone of the last block: `a · x + last ≥ ‖(a · x − last, 2)‖`, which means that
    /// `last` is at least 1 ÷ (a · x).
    pub fn inverse(&mut self, factors: &[f64]) {
        for last in [-1.0, 1.0] {
            self.arms.extend(factors.iter().map(|a| -a));
            self.arms.push(last);
        }
        self.bounds.extend([0.0, 0.0, 2.0]);
    }

    /// Enters a variable of the last block in a link. `pairs` is the number of pairs of such a
    /// variable and such a link among those that both stand for.
    pub fn link(&mut self, var: usize, link: usize, factor: f64, pairs: f64) {
        self.entries.push(Entry { var: var as u32, link: link as u32, factor });
        self.pairs.push(pairs);
        if let Some(block) = self.blocks.last_mut() {
            block.entries = self.entries.len() as u32;
        }
    }

    /// The optimal values; `None` if there are none, or if the search failed numerically.
    /// `precision` of rows and cost, relative to their size; [`EXACT`] is close to the attainable
    /// limit.
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
    #[inline]
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

    #[inline]
    fn entries_of(&self, block: &Block) -> &[Entry] {
        &self.entries[block.entry as usize..block.entries as usize]
    }

    /// Divides rows and variables so that the largest factor in each is about 1. Returns the
    /// divisors of variables and rows.
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

/// Sums and maxima run in four lanes, because a single one would be bound by its own latency.
const LANES: usize = 4;

#[inline(always)]
#[expect(clippy::inline_always, reason = "sizes are known only where it is called")]
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let (a, rest_a) = a.as_chunks::<LANES>();
    let (b, rest_b) = b.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        for i in 0..LANES {
            lanes[i] += a[i] * b[i];
        }
    }
    let rest: f64 = rest_a.iter().zip(rest_b).map(|(x, y)| x * y).sum();
    lanes.iter().sum::<f64>() + rest
}

fn weighed(weights: &[f64], a: &[f64], b: &[f64]) -> f64 {
    let (weights, rest_weights) = weights.as_chunks::<LANES>();
    let (a, rest_a) = a.as_chunks::<LANES>();
    let (b, rest_b) = b.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for (w, (a, b)) in weights.iter().zip(a.iter().zip(b)) {
        for i in 0..LANES {
            lanes[i] += w[i] * a[i] * b[i];
        }
    }
    let rest = rest_weights.iter().zip(rest_a.iter().zip(rest_b)).map(|(w, (x, y))| w * x * y);
    lanes.iter().sum::<f64>() + rest.sum::<f64>()
}

fn norm(a: &[f64], weights: &[f64]) -> f64 {
    weighed(weights, a, a).sqrt()
}

/// `a += b · by`, as long as the shorter of the two.
#[inline(always)]
#[expect(clippy::inline_always, reason = "sizes are known only where it is called")]
fn add(a: &mut [f64], b: &[f64], by: f64) {
    a.iter_mut().zip(b).for_each(|(a, b)| *a += b * by);
}

/// The largest of the absolute values.
fn largest(values: &[f64]) -> f64 {
    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] = if chunk[i].abs() > lanes[i] { chunk[i].abs() } else { lanes[i] };
        }
    }
    lanes.iter().chain(rest).fold(0.0, |m, v| if v.abs() > m { v.abs() } else { m })
}

#[cfg(test)]
mod tests;
