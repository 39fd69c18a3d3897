//! The matcher of the published Muri artifact, digit by digit.
//!
//! A primal-dual search with blossoms, O(n³). Profiles are few, so most weights tie, and which of
//! the equally heavy matchings results depends on the order of every loop and the strictness of
//! every comparison; both are kept. Three things look like mistakes and are not:
//!
//! - "tight" is exact (`slack <= 0.0`); only the test that ends the search has a tolerance;
//! - `weight(u, v)` and `weight(v, u)` are both kept, since they may differ in the last bit. An
//!   edge can then be tight from one side only, and the answer may be *not mutual*: `u → v` but `v
//!   → x`;
//! - pairs without an edge (weight 0) take part when a blossom chooses its representative edges.
//!
//! Our own addition is the speed. Nothing is allocated once the buffers are warm. The
//! representative edge of two vertices is the pair itself, and `rep[x][y]` is always `rep[y][x]`
//! reversed, so only blossoms have rows. Slacks are cached beside `near` while the labels do not
//! change. Offers to odd nodes, and rows of ids that are free or inside the current blossom, are
//! never read and never made.

mod blossom;

use std::ops::Range;

/// No partner.
pub const NONE: u32 = u32::MAX;

/// The largest graph: the weights alone take 128 MiB there.
pub const MAX_VERTICES: usize = 4096;

/// The published tolerance of the test that ends the search.
const RELEASED_CLOSE: f64 = 1e-5;

/// Vertices that a scan judges together.
const BLOCK: usize = 8;

const UNSEEN: i8 = -1;
const EVEN: i8 = 0;
const ODD: i8 = 1;

/// What a vertex costs: its label, the smallest blossom around it that has one (0 for none), and
/// the sum of the labels of all blossoms around it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Price {
    pub(super) label: f64,
    pub(super) shell: u32,
    pub(super) around: f64,
}

/// Reusable state of the search.
///
/// Ids are 1-based inside, as in the procedure: `1..=n` are vertices, above are blossoms, 0 is
/// none.
#[derive(Clone, Debug, Default)]
pub struct Matcher {
    n: usize,
    /// Highest id ever used in this call; free blossom ids below it are used again.
    hi: usize,
    /// Ids that the buffers hold: blossoms are nested with at least three petals, so n / 2 suffice.
    cap: usize,
    /// No tolerance in the final test.
    exact: bool,
    /// Length of a row: `n + 1`, rounded up to whole blocks.
    stride: usize,
    /// Doubled weights (exact), one row per vertex; minus infinity is no edge.
    twice: Vec<f64>,
    label: Vec<f64>,
    mate: Vec<u32>,
    /// Outermost blossom around an id; 0 for a free blossom id.
    top: Vec<u32>,
    side: Vec<i8>,
    /// For an odd node, the even vertex it was reached from.
    up: Vec<u32>,
    /// The label of a vertex as a scan sees it: infinite where an edge would have no effect.
    key: Vec<f64>,
    /// Vertices inside blossoms that are not odd, ascending, and whether the list is out of date.
    inner: Vec<u32>,
    stale: bool,
    /// Number of outermost blossoms that are not odd, as of the last update of `inner`.
    blossoms: usize,
    /// The scan that last offered its vertex to a blossom.
    offered: Vec<u32>,
    scans: u32,
    /// The even vertex with the least slack to a node, and that slack: infinite for none, minus
    /// infinite for a vertex inside a blossom, where nothing can be nearer.
    near: Vec<u32>,
    near_slack: Vec<f64>,
    /// `rep[(b - n - 1) * (cap + 1) + x]`: the edge from blossom `b` to node `x`, inner vertex
    /// first.
    rep: Vec<(u16, u16)>,
    /// The cycle of a blossom, base first; the blossom directly around an id.
    petals: Vec<Vec<u32>>,
    parent: Vec<u32>,
    queue: Vec<u32>,
    head: usize,
    /// Scratch: a work list, the marks of one walk to the root, slacks of a new blossom's row.
    work: Vec<u32>,
    seen: Vec<u32>,
    walk: u32,
    best: Vec<f64>,
    answer: Vec<u32>,
}

impl Matcher {
    /// A matcher with empty buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// A matcher without tolerance, for weights that are whole numbers.
    pub(super) fn exact() -> Self {
        Self { exact: true, ..Self::default() }
    }

    /// Partner of each of the vertices `0..n`, or [`NONE`].
    ///
    /// `weight(u, v)` is asked for every ordered pair `u ≠ v`; 0 is no edge. The answer need not be
    /// mutual when the weights are not symmetric: read `u`'s partner only if it points back.
    pub fn solve(&mut self, n: usize, weight: impl Fn(usize, usize) -> f64) -> &[u32] {
        assert!(n <= MAX_VERTICES, "a graph has at most {MAX_VERTICES} vertices");
        self.reset(n);
        let mut largest = 0.0f64;
        for u in 0..n {
            let row = &mut self.twice[(u + 1) * self.stride..(u + 2) * self.stride];
            for (v, cell) in row[1..=n].iter_mut().enumerate() {
                let w = if u == v { 0.0 } else { weight(u, v) };
                assert!((0.0..f64::INFINITY).contains(&w), "weights are finite and not negative");
                *cell = if w > 0.0 { w * 2.0 } else { f64::NEG_INFINITY };
                largest = largest.max(w);
            }
        }
        self.label[1..=n].fill(largest);
        if largest > 0.0 {
            while self.phase() {}
        }
        self.answer.clear();
        // Id 0, no partner, becomes NONE.
        self.answer.extend(self.mate[1..=n].iter().map(|m| m.wrapping_sub(1)));
        &self.answer
    }

    /// Takes the last step, which the search leaves out: with it the labels prove the answer if the
    /// arithmetic was exact. The labels of two vertices and of all blossoms around both add up to
    /// at least twice their weight, to exactly that for a pair, and an unmatched vertex has label
    /// 0.
    pub(super) fn settle(&mut self) {
        let even = (1..=self.n).filter(|&u| self.side[self.top[u] as usize] == EVEN);
        let step = even.map(|u| self.label[u]).fold(f64::INFINITY, f64::min);
        if step < f64::INFINITY {
            self.adjust(step);
        }
        self.side.fill(UNSEEN);
    }

    /// The last answer.
    pub(super) fn mates(&self) -> &[u32] {
        &self.answer
    }

    /// Where vertex `u` stands in the proof.
    pub(super) fn price(&self, u: usize) -> Price {
        let (mut x, outer) = (u + 1, self.top[u + 1] as usize);
        let mut price = Price { label: self.label[x], shell: 0, around: 0.0 };
        while x != outer {
            x = self.parent[x] as usize;
            if price.shell == 0 && self.label[x] > 0.0 {
                price.shell = x as u32;
            }
            price.around += self.label[x];
        }
        price
    }

    /// Fresh state for `n` vertices; keeps what is allocated. Rows of `rep` are written before
    /// read.
    fn reset(&mut self, n: usize) {
        let cap = n + n / 2;
        (self.n, self.hi, self.cap) = (n, n, cap);
        self.stride = (n + 1).next_multiple_of(BLOCK);
        self.twice.resize((n + 1) * self.stride, 0.0);
        self.key.clear();
        self.key.resize(self.stride, f64::INFINITY);
        self.rep.resize((n / 2) * (cap + 1), (0, 0));
        self.label.clear();
        self.label.resize(cap + 1, 0.0);
        for ids in [&mut self.mate, &mut self.top, &mut self.up, &mut self.near] {
            ids.clear();
            ids.resize(cap + 1, 0);
        }
        for (x, top) in self.top.iter_mut().enumerate().take(n + 1) {
            *top = x as u32;
        }
        self.side.resize(cap + 1, UNSEEN);
        // Scans read whole blocks of near_slack, also past the last id.
        self.near_slack.resize((cap + 1).max(self.stride), f64::INFINITY);
        self.best.resize(cap + 1, 0.0);
        self.parent.resize(cap + 1, 0);
        if self.petals.len() <= cap {
            self.petals.resize_with(cap + 1, Vec::new);
        }
        for marks in [&mut self.seen, &mut self.offered] {
            marks.clear();
            marks.resize(cap + 1, 0);
        }
        (self.walk, self.scans) = (0, 0);
    }

    /// Slack of the edge, or pair without an edge, from vertex `a` to vertex `b`.
    #[inline]
    fn slack(&self, a: usize, b: usize) -> f64 {
        (self.label[a] + self.label[b]) - self.twice[a * self.stride + b].max(0.0)
    }

    #[inline]
    fn row(&self, blossom: usize) -> usize {
        (blossom - self.n - 1) * (self.cap + 1)
    }

    /// The representative edge from node `x` to node `y`: a vertex in `x`, a vertex in `y`.
    #[inline]
    fn edge(&self, x: usize, y: usize) -> (usize, usize) {
        if x > self.n {
            let (a, b) = self.rep[self.row(x) + y];
            (a as usize, b as usize)
        } else if y > self.n {
            let (b, a) = self.rep[self.row(y) + x];
            (a as usize, b as usize)
        } else {
            (x, y)
        }
    }

    #[inline]
    fn outer(&self, id: u32) -> usize {
        self.top[id as usize] as usize
    }

    #[inline]
    fn forget_near(&mut self, x: usize) {
        self.near[x] = 0;
        self.near_slack[x] = f64::INFINITY;
        self.offered[x] = 0;
    }

    /// Remembers `u` as nearest to `x` if it is strictly nearer.
    #[inline]
    fn offer(&mut self, u: usize, x: usize) {
        let (a, b) = self.edge(u, x);
        let slack = self.slack(a, b);
        if slack < self.near_slack[x] {
            self.near[x] = u as u32;
            self.near_slack[x] = slack;
        }
    }

    fn rescan(&mut self, x: usize) {
        self.forget_near(x);
        for u in 1..=self.n {
            let outer = self.top[u] as usize;
            if outer == x || self.side[outer] != EVEN {
                continue;
            }
            let (a, b) = self.edge(u, x);
            if self.twice[a * self.stride + b] > 0.0 {
                self.offer(u, x);
            }
        }
    }

    /// Follows a tight edge; true if it made the matching larger.
    fn tight(&mut self, a: usize, b: usize) -> bool {
        let (u, v) = (self.top[a] as usize, self.top[b] as usize);
        match self.side[v] {
            UNSEEN => {
                self.up[v] = a as u32;
                self.side[v] = ODD;
                let y = self.outer(self.mate[v]);
                self.forget_near(v);
                self.forget_near(y);
                // With asymmetric weights y can have been odd, and then its keys are restored.
                let simple = v <= self.n && self.side[y] != ODD;
                self.side[y] = EVEN;
                if simple {
                    self.key[v] = f64::INFINITY;
                } else {
                    self.rekey();
                }
                self.enqueue(y);
                false
            }
            EVEN => {
                let base = self.meet(u, v);
                if base == 0 {
                    self.augment(u, v);
                    self.augment(v, u);
                    return true;
                }
                self.shrink(u, base, v);
                false
            }
            _ => false,
        }
    }

    /// Brings `key` up to date with labels and sides.
    fn rekey(&mut self) {
        for v in 1..=self.n {
            let odd = self.side[self.top[v] as usize] == ODD;
            self.key[v] = if odd { f64::INFINITY } else { self.label[v] };
        }
        self.stale = true;
    }

    /// Scans all edges of the even vertex `u`; true if the matching grew.
    ///
    /// Most edges are neither tight nor nearer than what is known, so whole blocks are skipped.
    /// Offers to blossoms are deferred until the next tight edge, before which they are not read.
    fn scan(&mut self, u: usize) -> bool {
        let row = u * self.stride;
        let label = self.label[u];
        self.scans += 1;
        let mut offered = 0;
        for start in (0..self.stride).step_by(BLOCK) {
            let block = start..start + BLOCK;
            let keys = self.key[block.clone()].iter().zip(&self.twice[row..][block.clone()]);
            let nears = &self.near_slack[block.clone()];
            // Without branches, so that the compiler can judge several edges at once.
            let busy = keys.zip(nears).fold(0u64, |busy, ((key, twice), near)| {
                let slack = (label + key) - twice;
                busy | u64::from(slack <= 0.0) | u64::from(slack < *near)
            });
            if busy == 0 {
                continue;
            }
            for v in block.start.max(1)..block.end.min(self.n + 1) {
                let slack = (label + self.key[v]) - self.twice[row + v];
                if slack <= 0.0 {
                    if self.top[v] != self.top[u] {
                        self.offer_to_blossoms(u, offered..v);
                        offered = v + 1;
                        if self.tight(u, v) {
                            return true;
                        }
                    }
                } else if slack < self.near_slack[v] {
                    self.near[v] = u as u32;
                    self.near_slack[v] = slack;
                }
            }
        }
        self.offer_to_blossoms(u, offered..self.n + 1);
        false
    }

    /// Makes the offers of `u` that are due for the vertices in `range` that lie in blossoms.
    fn offer_to_blossoms(&mut self, u: usize, range: Range<usize>) {
        if std::mem::take(&mut self.stale) {
            let (top, side) = (&self.top, &self.side);
            let within = |v: &u32| top[*v as usize] != *v && side[top[*v as usize] as usize] != ODD;
            self.inner.clear();
            self.inner.extend((1..=self.n as u32).filter(within));
            let bare = |b: &usize| top[*b] as usize == *b && side[*b] != ODD;
            self.blossoms = (self.n + 1..=self.hi).filter(bare).count();
        }
        let around = self.top[u];
        // The first call of a scan can stop when each blossom has had its offer.
        let others = self.blossoms - usize::from(around as usize > self.n);
        let mut left = if range.start == 0 { others } else { usize::MAX };
        for i in self.inner.partition_point(|v| (*v as usize) < range.start)..self.inner.len() {
            let v = self.inner[i] as usize;
            if v >= range.end || left == 0 {
                return;
            }
            let x = self.top[v] as usize;
            if self.top[v] == around || self.offered[x] == self.scans {
                continue;
            }
            let slack = (self.label[u] + self.key[v]) - self.twice[u * self.stride + v];
            if slack > 0.0 && slack < f64::INFINITY {
                self.offer(u, x);
                self.offered[x] = self.scans;
                left -= 1;
            }
        }
    }

    /// The largest step the labels can take before an edge becomes tight or a blossom opens.
    fn step(&self) -> f64 {
        let mut step = f64::INFINITY;
        for b in self.n + 1..=self.hi {
            if self.top[b] as usize == b && self.side[b] == ODD {
                step = step.min(self.label[b] / 2.0);
            }
        }
        for x in 1..=self.hi {
            if self.top[x] as usize == x && self.near[x] != 0 {
                match self.side[x] {
                    UNSEEN => step = step.min(self.near_slack[x]),
                    EVEN => step = step.min(self.near_slack[x] / 2.0),
                    _ => {}
                }
            }
        }
        step
    }

    /// Whether a label would fall to zero: no heavier matching exists.
    fn exhausted(&self, step: f64) -> bool {
        let close = if self.exact { 0.0 } else { RELEASED_CLOSE };
        (1..=self.n).any(|u| {
            let label = self.label[u];
            let near = || (label - step).abs() <= close * label.abs().max(step.abs());
            self.side[self.top[u] as usize] == EVEN && (label <= step || near())
        })
    }

    /// Moves the labels by `step` and brings the remembered slacks up to date.
    fn adjust(&mut self, step: f64) {
        for u in 1..=self.n {
            match self.side[self.top[u] as usize] {
                EVEN => self.label[u] -= step,
                ODD => self.label[u] += step,
                _ => {}
            }
        }
        for b in self.n + 1..=self.hi {
            if self.top[b] as usize == b {
                match self.side[b] {
                    EVEN => self.label[b] += step * 2.0,
                    ODD => self.label[b] -= step * 2.0,
                    _ => {}
                }
            }
        }
        for x in 1..=self.hi {
            if self.top[x] as usize == x && self.near[x] != 0 && self.side[x] != ODD {
                let (a, b) = self.edge(self.near[x] as usize, x);
                self.near_slack[x] = self.slack(a, b);
            }
        }
        self.rekey();
    }

    /// One search from all free nodes; true if the matching grew by a pair.
    fn phase(&mut self) -> bool {
        let hi = self.hi;
        self.side[..=hi].fill(UNSEEN);
        self.near[..=hi].fill(0);
        self.near_slack[..=hi].fill(f64::INFINITY);
        self.queue.clear();
        self.head = 0;
        for x in 1..=hi {
            if x <= self.n && self.top[x] as usize != x {
                self.near_slack[x] = f64::NEG_INFINITY;
            }
            if self.top[x] as usize == x && self.mate[x] == 0 {
                self.up[x] = 0;
                self.side[x] = EVEN;
                self.enqueue(x);
            }
        }
        if self.queue.is_empty() {
            return false;
        }
        self.rekey();
        loop {
            while self.head < self.queue.len() {
                let u = self.queue[self.head] as usize;
                self.head += 1;
                if self.side[self.top[u] as usize] != ODD && self.scan(u) {
                    return true;
                }
            }
            let step = self.step();
            if self.exhausted(step) {
                return false;
            }
            self.adjust(step);
            self.queue.clear();
            self.head = 0;
            if self.follow_nearest() {
                return true;
            }
            for b in self.n + 1..=self.hi {
                if self.top[b] as usize == b && self.side[b] == ODD && self.label[b] <= 0.0 {
                    self.expand(b);
                }
            }
        }
    }

    /// Follows the edges that the last step made tight; blossoms made on the way have to wait.
    fn follow_nearest(&mut self) -> bool {
        for x in 1..=self.hi {
            let near = self.near[x] as usize;
            if self.top[x] as usize != x || near == 0 || self.top[near] as usize == x {
                continue;
            }
            if self.side[x] != ODD && self.near_slack[x] <= 0.0 {
                let (a, b) = self.edge(near, x);
                if self.tight(a, b) {
                    return true;
                }
            }
        }
        false
    }
}
