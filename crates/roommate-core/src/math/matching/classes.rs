//! Matching thousands of vertices of a few classes at a cost that depends on the classes.
//!
//! Jobs are many and profiles are few, so this is a matching of class *multiplicities*. Three
//! steps:
//!
//! 1. **Relax.** Matching the classes against a second copy of themselves is a transport problem:
//!    integral, solved exactly in bulk. Half of it is an optimal *half-integral* answer here, and
//!    its weight is an upper bound.
//! 2. **Reduce.** The true answer differs from the relaxed one only near odd cycles of classes. All
//!    but `keep` pairs of each kind are taken as they are; the rest, a few vertices per class, is
//!    matched exactly.
//! 3. **Prove.** The labels of the small answer price its vertices. If every pair taken in bulk can
//!    be priced as a copy of two of them, then weak duality makes the whole answer maximal. If not,
//!    `keep` doubles.
//!
//! The reduced graph grows to at most [`REDUCED_LIMIT`] vertices. If even that proves nothing, the
//! answer is returned with the relaxed bound: the gap is [`Pairing::bound`] − [`Pairing::total`].

use super::exact::{Exact, scale};
use super::released::{NONE, Price};

/// Largest number of classes: their weights are a square table.
pub const MAX_CLASSES: usize = 1024;

/// The largest reduced graph; exact matching takes a fraction of a second there.
const REDUCED_LIMIT: usize = 1024;

/// Graphs up to this size are matched directly.
const DIRECT_LIMIT: usize = 24;

/// An answer and how good it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Pairing {
    /// Partner of each vertex, or [`NONE`]; mutual.
    pub mates: Vec<u32>,
    /// Total weight of the pairs.
    pub total: f64,
    /// No matching is heavier than this (up to the rounding stated at [`Exact`]); equal to `total`
    /// when the answer is proved maximal.
    pub bound: f64,
}

/// Matches vertices by class; buffers are reused.
#[derive(Clone, Debug, Default)]
pub struct ClassMatcher {
    exact: Exact,
    /// Number of classes, vertices per class, weights in whole steps.
    classes: usize,
    count: Vec<i64>,
    steps: Vec<i64>,
    transport: Transport,
    /// Pairs of each kind (`i <= j`) taken in bulk, vertices of each class left out as singles.
    bulk: Vec<i64>,
    idle: Vec<i64>,
    /// Class of each vertex of the reduced graph, and its answer.
    reduced: Vec<u32>,
    reduced_mates: Vec<u32>,
    prices: Vec<Price>,
}

impl ClassMatcher {
    /// A matcher with empty buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Matches vertices whose classes are `class_of` (each below `classes`).
    ///
    /// `weight(i, j)` is asked for `i <= j`; `weight(i, i)` is the weight of two vertices of one
    /// class, and 0 means that the two may not be matched. Vertices that come first in their class
    /// are matched first.
    pub fn solve(
        &mut self,
        class_of: &[u32],
        classes: usize,
        weight: impl Fn(usize, usize) -> f64,
    ) -> Pairing {
        assert!(classes <= MAX_CLASSES, "there are at most {MAX_CLASSES} classes");
        self.classes = classes;
        self.count.clear();
        self.count.resize(classes, 0);
        for &class in class_of {
            self.count[class as usize] += 1;
        }
        let scale = self.round(&weight);
        let n = class_of.len();
        let (proved, halves) = self.search(n);
        let mates = self.assign(class_of);
        let total = mates.iter().enumerate().filter(|(u, v)| **v != NONE && *u < **v as usize);
        let class = |u: usize| class_of[u] as usize;
        let total: f64 = total
            .map(|(u, &v)| (class(u), class(v as usize)))
            .map(|(i, j)| weight(i.min(j), i.max(j)))
            .sum();
        let bound = if proved { total } else { (halves as f64 / scale / 2.0).max(total) };
        Pairing { mates, total, bound }
    }

    /// Weights in whole steps; returns steps per unit of weight.
    fn round(&mut self, weight: impl Fn(usize, usize) -> f64) -> f64 {
        let classes = self.classes;
        let pairs = || (0..classes).flat_map(|i| (i..classes).map(move |j| (i, j)));
        let largest = pairs().map(|(i, j)| weight(i, j)).fold(0.0, f64::max);
        let scale = scale(largest);
        self.steps.clear();
        self.steps.resize(classes * classes, 0);
        for (i, j) in pairs() {
            let w = weight(i, j);
            assert!((0.0..f64::INFINITY).contains(&w), "weights are finite and not negative");
            self.steps[i * classes + j] = (w * scale).round() as i64;
            self.steps[j * classes + i] = self.steps[i * classes + j];
        }
        scale
    }

    /// Fills `bulk` and the reduced answer; whether it is proved, and twice the relaxed weight.
    fn search(&mut self, n: usize) -> (bool, i64) {
        if n <= DIRECT_LIMIT {
            self.bulk.clear();
            self.bulk.resize(self.classes * self.classes, 0);
            self.idle.clear();
            self.idle.resize(self.classes, 0);
            self.match_reduced();
            return (true, 0);
        }
        let halves = self.transport.solve(&self.count, &self.steps);
        let mut keep = 1;
        loop {
            self.reduce(keep);
            self.match_reduced();
            if self.proved() {
                return (true, halves);
            }
            // Each kind of pair grows by as much as it has, so twice the size is an upper bound.
            if self.reduced.len() * 2 > REDUCED_LIMIT {
                return (false, halves);
            }
            keep *= 2;
        }
    }

    /// Takes all but `keep` relaxed pairs of each kind, and all but `2 keep` relaxed singles.
    fn reduce(&mut self, keep: i64) {
        let (classes, flow) = (self.classes, &self.transport.flow);
        self.bulk.clear();
        self.bulk.resize(classes * classes, 0);
        self.idle.clear();
        self.idle.resize(classes, 0);
        for i in 0..classes {
            let sent: i64 =
                (0..classes).map(|j| flow[i * classes + j] + flow[j * classes + i]).sum();
            self.idle[i] = ((2 * self.count[i] - sent) / 2 - 2 * keep).max(0);
            for j in i..classes {
                let halves = flow[i * classes + j] + if i < j { flow[j * classes + i] } else { 0 };
                self.bulk[i * classes + j] = (halves / 2 - keep).max(0);
            }
        }
    }

    /// Matches exactly what the bulk leaves over.
    fn match_reduced(&mut self) {
        let classes = self.classes;
        self.reduced.clear();
        for i in 0..classes {
            let taken: i64 = (0..classes)
                .map(|j| self.bulk[i.min(j) * classes + i.max(j)] << usize::from(i == j))
                .sum();
            let left = self.count[i] - taken - self.idle[i];
            assert!(left >= 0, "the bulk stays within the class");
            self.reduced.extend((0..left).map(|_| i as u32));
        }
        let (reduced, steps) = (&self.reduced, &self.steps);
        let weight =
            |u: usize, v: usize| steps[reduced[u] as usize * classes + reduced[v] as usize] as f64;
        let answer = self.exact.prove(reduced.len(), weight);
        self.reduced_mates.clear();
        self.reduced_mates.extend_from_slice(answer.mates());
        self.prices.clear();
        self.prices.extend((0..reduced.len()).map(|u| answer.price(u)));
    }

    /// Whether the prices of the reduced graph prove the whole answer.
    ///
    /// An idle vertex gets label 0, and no other vertex may gain by an edge to it. The two vertices
    /// of a bulk pair become copies of two reduced vertices, label and blossoms, that pay exactly
    /// for the pair; a blossom that gains both stays odd. A copy's edges are then paid for as its
    /// model's are, all but the one to the model itself.
    fn proved(&self) -> bool {
        let classes = self.classes;
        (0..classes).all(|i| {
            (self.idle[i] == 0 || self.worthless(i))
                && (i..classes).all(|j| self.bulk[i * classes + j] == 0 || self.copied(i, j))
        })
    }

    fn twice(&self, i: usize, j: usize) -> f64 {
        (2 * self.steps[i * self.classes + j]) as f64
    }

    /// No vertex would pay for a further one of class `i`.
    fn worthless(&self, i: usize) -> bool {
        let paid = |(&j, p): (&u32, &Price)| p.label >= self.twice(i, j as usize);
        self.reduced.iter().zip(&self.prices).all(paid)
            && (0..self.classes).all(|j| self.idle[j] == 0 || self.twice(i, j) == 0.0)
    }

    /// Some prices of the classes `i` and `j` pay exactly for their pairs.
    fn copied(&self, i: usize, j: usize) -> bool {
        let of = |class: usize| {
            let start = self.reduced.partition_point(|&c| (c as usize) < class);
            let end = self.reduced.partition_point(|&c| c as usize <= class);
            let itself = move |p: &&Price| p.label * 2.0 + p.around >= self.twice(class, class);
            self.prices[start..end].iter().filter(itself)
        };
        let pays = |p: &Price, q: &Price| p.label + q.label + p.around == self.twice(i, j);
        of(i).any(|p| of(j).any(|q| p.shell == q.shell && pays(p, q)))
    }

    /// Assigns the pairs to the vertices, in their order within each class.
    fn assign(&self, class_of: &[u32]) -> Vec<u32> {
        let classes = self.classes;
        let mut members: Vec<Vec<u32>> = vec![Vec::new(); classes];
        for (u, &class) in class_of.iter().enumerate().rev() {
            members[class as usize].push(u as u32);
        }
        let mut mates = vec![NONE; class_of.len()];
        let mut pair = |i: usize, j: usize| {
            let u = members[i].pop().expect("a pair has its first vertex");
            let v = members[j].pop().expect("a pair has its second vertex");
            (mates[u as usize], mates[v as usize]) = (v, u);
        };
        for i in 0..classes {
            for j in i..classes {
                (0..self.bulk[i * classes + j]).for_each(|_| pair(i, j));
            }
        }
        for (u, &v) in self.reduced_mates.iter().enumerate() {
            if v != NONE && u < v as usize {
                pair(self.reduced[u] as usize, self.reduced[v as usize] as usize);
            }
        }
        mates
    }
}

/// The heaviest transport between two copies of the classes, by shortest augmenting paths.
///
/// Nodes `0..c` are suppliers, `c..2c` takers. Lengths are losses of weight; prices keep them
/// non-negative, and a path moves as many units as it can carry.
#[derive(Clone, Debug, Default)]
struct Transport {
    /// Units from class `i` of the first copy to class `j` of the second.
    flow: Vec<i64>,
    supply: Vec<i64>,
    room: Vec<i64>,
    price: Vec<i64>,
    length: Vec<i64>,
    from: Vec<u32>,
    done: Vec<bool>,
}

const FAR: i64 = i64::MAX / 4;

impl Transport {
    /// Fills `flow`; its weight.
    fn solve(&mut self, count: &[i64], steps: &[i64]) -> i64 {
        let c = count.len();
        self.flow.clear();
        self.flow.resize(c * c, 0);
        for ends in [&mut self.supply, &mut self.room] {
            ends.clear();
            ends.extend_from_slice(count);
        }
        // A taker's price starts at its largest weight to any supplier, so no length is negative.
        self.price.clear();
        self.price.resize(2 * c, 0);
        for j in 0..c {
            self.price[c + j] = -(0..c).map(|i| steps[i * c + j]).max().unwrap_or(0);
        }
        while let Some(end) = self.shortest(c, steps) {
            self.push(c, end);
        }
        self.flow.iter().zip(steps).map(|(units, weight)| units * weight).sum()
    }

    /// Lengths from all suppliers that have units left (Dijkstra, dense); the taker with room at
    /// the end of the path that gains most, if one gains.
    fn shortest(&mut self, c: usize, steps: &[i64]) -> Option<usize> {
        self.length.clear();
        self.length.resize(2 * c, FAR);
        self.from.clear();
        self.from.resize(2 * c, NONE);
        self.done.clear();
        self.done.resize(2 * c, false);
        // The source has price 0 and edges of length 0, so a supplier starts at -price >= 0.
        for i in 0..c {
            if self.supply[i] > 0 {
                self.length[i] = -self.price[i];
            }
        }
        loop {
            let open = (0..2 * c).filter(|&x| !self.done[x] && self.length[x] < FAR);
            let Some(x) = open.min_by_key(|&x| self.length[x]) else { break };
            self.done[x] = true;
            let here = self.length[x] + self.price[x];
            for k in 0..c {
                let (y, edge) = if x < c { (c + k, x * c + k) } else { (k, k * c + x - c) };
                let usable = if x < c { steps[edge] > 0 } else { self.flow[edge] > 0 };
                if !usable || self.done[y] {
                    continue;
                }
                let loss = if x < c { -steps[edge] } else { steps[edge] };
                let there = here + loss - self.price[y];
                debug_assert!(there >= self.length[x], "prices keep lengths from falling");
                if there < self.length[y] {
                    self.length[y] = there;
                    self.from[y] = x as u32;
                }
            }
        }
        let gain = |x: usize| -(self.length[x] + self.price[x]);
        let ends = (c..2 * c).filter(|&x| self.room[x - c] > 0 && self.length[x] < FAR);
        let end = ends.max_by_key(|&x| gain(x)).filter(|&x| gain(x) > 0)?;
        // What cannot be reached now cannot be reached later, so its price does not matter.
        for x in (0..2 * c).filter(|&x| self.length[x] < FAR) {
            self.price[x] += self.length[x];
        }
        Some(end)
    }

    /// Sends as many units as fit along the path that ends at `end`.
    fn push(&mut self, c: usize, end: usize) {
        let mut units = self.room[end - c];
        let mut x = end;
        while self.from[x] != NONE {
            let y = self.from[x] as usize;
            if x < c {
                units = units.min(self.flow[x * c + y - c]);
            }
            x = y;
        }
        units = units.min(self.supply[x]);
        self.supply[x] -= units;
        self.room[end - c] -= units;
        let mut x = end;
        while self.from[x] != NONE {
            let y = self.from[x] as usize;
            if x < c {
                self.flow[x * c + y - c] -= units;
            } else {
                self.flow[y * c + x - c] += units;
            }
            x = y;
        }
    }
}
