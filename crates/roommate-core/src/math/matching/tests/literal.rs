//! The published procedure word for word: full tables, no shortcuts. Slow, obvious, for comparison.

use std::collections::{BTreeSet, VecDeque};

type Edge = (usize, usize, f64);

struct Literal {
    n: usize,
    hi: usize,
    w: Vec<Vec<f64>>,
    rep: Vec<Vec<Edge>>,
    label: Vec<f64>,
    mate: Vec<usize>,
    top: Vec<usize>,
    side: Vec<i8>,
    up: Vec<usize>,
    near: Vec<usize>,
    petals: Vec<Vec<usize>>,
    home: Vec<Vec<usize>>,
    queue: VecDeque<usize>,
}

/// Partners, 1-based, 0 for none.
pub(super) fn solve(n: usize, weight: impl Fn(usize, usize) -> f64) -> Vec<u32> {
    let ids = 2 * n + 1;
    let mut w = vec![vec![0.0; n + 1]; n + 1];
    let mut rep = vec![vec![(0, 0, 0.0); ids]; ids];
    let mut home = vec![vec![0; n + 1]; ids];
    let mut largest = 0.0f64;
    for u in 1..=n {
        for v in 1..=n {
            if u != v {
                w[u][v] = weight(u - 1, v - 1);
            }
            largest = largest.max(w[u][v]);
            rep[u][v] = (u, v, w[u][v]);
        }
        home[u][u] = u;
    }
    let mut it = Literal {
        n,
        hi: n,
        w,
        rep,
        label: (0..ids).map(|x| if (1..=n).contains(&x) { largest } else { 0.0 }).collect(),
        mate: vec![0; ids],
        top: (0..ids).map(|x| if x <= n { x } else { 0 }).collect(),
        side: vec![-1; ids],
        up: vec![0; ids],
        near: vec![0; ids],
        petals: vec![Vec::new(); ids],
        home,
        queue: VecDeque::new(),
    };
    // Without any edge the policy does not call the matcher.
    while largest > 0.0 && it.phase() {}
    it.mate[1..=n].iter().map(|&m| m as u32).collect()
}

impl Literal {
    fn slack(&self, (a, b, _): Edge) -> f64 {
        (self.label[a] + self.label[b]) - self.w[a][b] * 2.0
    }

    fn offer(&mut self, u: usize, x: usize) {
        let near = self.near[x];
        if near == 0 || self.slack(self.rep[u][x]) < self.slack(self.rep[near][x]) {
            self.near[x] = u;
        }
    }

    fn rescan(&mut self, x: usize) {
        self.near[x] = 0;
        for u in 1..=self.n {
            if self.rep[u][x].2 > 0.0 && self.top[u] != x && self.side[self.top[u]] == 0 {
                self.offer(u, x);
            }
        }
    }

    fn enqueue(&mut self, x: usize) {
        let mut work = VecDeque::from([x]);
        while let Some(y) = work.pop_front() {
            if y <= self.n {
                self.queue.push_back(y);
            } else {
                work.extend(&self.petals[y]);
            }
        }
    }

    fn set_top(&mut self, x: usize, b: usize) {
        self.top[x] = b;
        if x > self.n {
            for petal in self.petals[x].clone() {
                self.set_top(petal, b);
            }
        }
    }

    fn seat(&mut self, b: usize, x: usize) -> usize {
        let i = self.petals[b].iter().position(|&p| p == x).expect("a petal");
        if i % 2 == 0 {
            return i;
        }
        self.petals[b][1..].reverse();
        self.petals[b].len() - i
    }

    fn set_mate(&mut self, u: usize, v: usize) {
        let (a, b, _) = self.rep[u][v];
        self.mate[u] = b;
        if u > self.n {
            let x = self.home[u][a];
            let i = self.seat(u, x);
            for j in 0..i {
                self.set_mate(self.petals[u][j], self.petals[u][j ^ 1]);
            }
            self.set_mate(x, v);
            self.petals[u].rotate_left(i);
        }
    }

    fn augment(&mut self, mut u: usize, mut v: usize) {
        loop {
            let y = self.top[self.mate[u]];
            self.set_mate(u, v);
            if y == 0 {
                return;
            }
            let z = self.top[self.up[y]];
            self.set_mate(y, z);
            (u, v) = (z, y);
        }
    }

    fn meet(&self, mut u: usize, mut v: usize) -> usize {
        let mut visited = BTreeSet::new();
        while u != 0 || v != 0 {
            if u != 0 {
                if !visited.insert(u) {
                    return u;
                }
                u = self.top[self.mate[u]];
                if u != 0 {
                    u = self.top[self.up[u]];
                }
            }
            (u, v) = (v, u);
        }
        0
    }

    fn gather(&mut self, b: usize, mut x: usize, base: usize) {
        while x != base {
            let y = self.top[self.mate[x]];
            self.petals[b].push(x);
            self.petals[b].push(y);
            self.enqueue(y);
            x = self.top[self.up[y]];
        }
    }

    fn shrink(&mut self, u: usize, base: usize, v: usize) {
        let b = (self.n + 1..=self.hi).find(|&b| self.top[b] == 0).unwrap_or(self.hi + 1);
        self.hi = self.hi.max(b);
        self.label[b] = 0.0;
        self.side[b] = 0;
        self.mate[b] = self.mate[base];
        self.petals[b] = vec![base];
        self.gather(b, u, base);
        self.petals[b][1..].reverse();
        self.gather(b, v, base);
        self.set_top(b, b);
        for x in 1..=self.hi {
            self.rep[b][x].2 = 0.0;
            self.rep[x][b].2 = 0.0;
        }
        self.home[b].fill(0);
        for s in self.petals[b].clone() {
            for x in 1..=self.hi {
                let better = self.slack(self.rep[s][x]) < self.slack(self.rep[b][x]);
                if self.rep[b][x].2 <= 0.0 || better {
                    self.rep[b][x] = self.rep[s][x];
                    self.rep[x][b] = self.rep[x][s];
                }
            }
            for x in 1..=self.n {
                if self.home[s][x] != 0 {
                    self.home[b][x] = s;
                }
            }
        }
        self.rescan(b);
    }

    fn expand(&mut self, b: usize) {
        for z in self.petals[b].clone() {
            self.set_top(z, z);
        }
        let r = self.home[b][self.rep[b][self.up[b]].0];
        let i = self.seat(b, r);
        for j in (0..i).step_by(2) {
            let (s, t) = (self.petals[b][j], self.petals[b][j + 1]);
            self.up[s] = self.rep[t][s].0;
            self.side[s] = 1;
            self.side[t] = 0;
            self.near[s] = 0;
            self.rescan(t);
            self.enqueue(t);
        }
        self.side[r] = 1;
        self.up[r] = self.up[b];
        for j in i + 1..self.petals[b].len() {
            self.side[self.petals[b][j]] = -1;
            self.rescan(self.petals[b][j]);
        }
        self.top[b] = 0;
    }

    fn tight(&mut self, (a, b, _): Edge) -> bool {
        let (u, v) = (self.top[a], self.top[b]);
        if self.side[v] == -1 {
            self.up[v] = a;
            self.side[v] = 1;
            let y = self.top[self.mate[v]];
            self.near[v] = 0;
            self.near[y] = 0;
            self.side[y] = 0;
            self.enqueue(y);
        } else if self.side[v] == 0 {
            let base = self.meet(u, v);
            if base == 0 {
                self.augment(u, v);
                self.augment(v, u);
                return true;
            }
            self.shrink(u, base, v);
        }
        false
    }

    fn begin(&mut self) {
        self.side.fill(-1);
        self.near.fill(0);
        self.queue.clear();
        for x in 1..=self.hi {
            if self.top[x] == x && self.mate[x] == 0 {
                self.up[x] = 0;
                self.side[x] = 0;
                self.enqueue(x);
            }
        }
    }

    /// Empties the queue; true if a pair was found.
    fn search(&mut self) -> bool {
        while let Some(u) = self.queue.pop_front() {
            if self.side[self.top[u]] == 1 {
                continue;
            }
            for v in 1..=self.n {
                if self.w[u][v] > 0.0 && self.top[u] != self.top[v] {
                    if self.slack(self.rep[u][v]) <= 0.0 {
                        if self.tight(self.rep[u][v]) {
                            return true;
                        }
                    } else {
                        self.offer(u, self.top[v]);
                    }
                }
            }
        }
        false
    }

    fn step(&self) -> f64 {
        let mut step = f64::INFINITY;
        for b in self.n + 1..=self.hi {
            if self.top[b] == b && self.side[b] == 1 {
                step = step.min(self.label[b] / 2.0);
            }
        }
        for x in 1..=self.hi {
            if self.top[x] == x && self.near[x] != 0 {
                let slack = self.slack(self.rep[self.near[x]][x]);
                match self.side[x] {
                    -1 => step = step.min(slack),
                    0 => step = step.min(slack / 2.0),
                    _ => {}
                }
            }
        }
        step
    }

    /// Moves the labels; false if one would fall to zero.
    fn adjust(&mut self, step: f64) -> bool {
        for u in 1..=self.n {
            if self.side[self.top[u]] == 0 {
                let label = self.label[u];
                if label <= step || (label - step).abs() <= 1e-5 * label.abs().max(step.abs()) {
                    return false;
                }
                self.label[u] -= step;
            } else if self.side[self.top[u]] == 1 {
                self.label[u] += step;
            }
        }
        for b in self.n + 1..=self.hi {
            if self.top[b] == b && self.side[b] == 0 {
                self.label[b] += step * 2.0;
            } else if self.top[b] == b && self.side[b] == 1 {
                self.label[b] -= step * 2.0;
            }
        }
        true
    }

    fn phase(&mut self) -> bool {
        self.begin();
        if self.queue.is_empty() {
            return false;
        }
        loop {
            if self.search() {
                return true;
            }
            let step = self.step();
            if !self.adjust(step) {
                return false;
            }
            self.queue.clear();
            for x in 1..=self.hi {
                let near = self.near[x];
                if self.top[x] == x && near != 0 && self.top[near] != x {
                    let edge = self.rep[near][x];
                    if self.slack(edge) <= 0.0 && self.tight(edge) {
                        return true;
                    }
                }
            }
            for b in self.n + 1..=self.hi {
                if self.top[b] == b && self.side[b] == 1 && self.label[b] <= 0.0 {
                    self.expand(b);
                }
            }
        }
    }
}
