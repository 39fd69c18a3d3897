//! Operations on the forest and the blossoms: swap pairs along a path, contract an odd cycle into a
//! blossom, expand one again.

use super::{EVEN, Matcher, ODD, UNSEEN};

impl Matcher {
    /// Queues the vertices of `x`, level by level; depth first would give another matching.
    pub(super) fn enqueue(&mut self, x: usize) {
        if x <= self.n {
            self.queue.push(x as u32);
            return;
        }
        self.work.clear();
        self.work.push(x as u32);
        let mut next = 0;
        while next < self.work.len() {
            let y = self.work[next] as usize;
            next += 1;
            if y <= self.n {
                self.queue.push(y as u32);
            } else {
                self.work.extend_from_slice(&self.petals[y]);
            }
        }
    }

    fn set_top(&mut self, x: usize, b: usize) {
        self.work.clear();
        self.work.push(x as u32);
        while let Some(y) = self.work.pop() {
            let y = y as usize;
            self.top[y] = b as u32;
            if y > self.n {
                self.work.extend_from_slice(&self.petals[y]);
            }
        }
    }

    /// The petal of `b` that holds vertex `v`.
    fn home(&self, b: usize, v: usize) -> usize {
        let mut x = v;
        while self.parent[x] as usize != b {
            x = self.parent[x] as usize;
        }
        x
    }

    /// Even position of petal `x` in `b`, reversing the cycle if necessary.
    fn seat(&mut self, b: usize, x: usize) -> usize {
        let petals = &mut self.petals[b];
        let i = petals.iter().position(|&p| p as usize == x).expect("a petal sits in its blossom");
        if i % 2 == 1 {
            petals[1..].reverse();
            petals.len() - i
        } else {
            i
        }
    }

    fn set_mate(&mut self, u: usize, v: usize) {
        let (a, b) = self.edge(u, v);
        self.mate[u] = b as u32;
        if u <= self.n {
            return;
        }
        let x = self.home(u, a);
        let i = self.seat(u, x);
        for j in 0..i {
            let (s, t) = (self.petals[u][j] as usize, self.petals[u][j ^ 1] as usize);
            self.set_mate(s, t);
        }
        self.set_mate(x, v);
        self.petals[u].rotate_left(i);
    }

    pub(super) fn augment(&mut self, u: usize, v: usize) {
        let (mut u, mut v) = (u, v);
        loop {
            let y = self.outer(self.mate[u]);
            self.set_mate(u, v);
            if y == 0 {
                return;
            }
            let z = self.outer(self.up[y]);
            self.set_mate(y, z);
            (u, v) = (z, y);
        }
    }

    /// Where the paths of `u` and `v` to their roots meet; 0 if the roots differ.
    pub(super) fn meet(&mut self, u: usize, v: usize) -> usize {
        self.walk += 1;
        let (mut here, mut there) = (u, v);
        while here != 0 || there != 0 {
            if here != 0 {
                if self.seen[here] == self.walk {
                    return here;
                }
                self.seen[here] = self.walk;
                here = self.outer(self.mate[here]);
                if here != 0 {
                    here = self.outer(self.up[here]);
                }
            }
            (here, there) = (there, here);
        }
        0
    }

    /// Appends the path from `x` up to `base` to the petals of `b`.
    fn gather(&mut self, b: usize, x: usize, base: usize) {
        let mut x = x;
        while x != base {
            let y = self.outer(self.mate[x]);
            self.petals[b].extend([x as u32, y as u32]);
            self.enqueue(y);
            x = self.outer(self.up[y]);
        }
    }

    pub(super) fn shrink(&mut self, u: usize, base: usize, v: usize) {
        let mut b = self.n + 1;
        while b <= self.hi && self.top[b] != 0 {
            b += 1;
        }
        assert!(b <= self.cap, "blossoms are nested, so there are fewer than n / 2");
        self.hi = self.hi.max(b);
        self.label[b] = 0.0;
        self.side[b] = EVEN;
        self.mate[b] = self.mate[base];
        self.petals[b].clear();
        self.petals[b].push(base as u32);
        self.gather(b, u, base);
        self.petals[b][1..].reverse();
        self.gather(b, v, base);
        self.set_top(b, b);
        self.best[1..=self.hi].fill(f64::INFINITY);
        for i in 0..self.petals[b].len() {
            let s = self.petals[b][i] as usize;
            self.parent[s] = b as u32;
            if s <= self.n {
                self.near_slack[s] = f64::NEG_INFINITY;
            }
            self.choose_edges(b, s);
        }
        self.rescan(b);
        self.rekey();
    }

    /// Copies the edges of petal `s` into the row of `b` where they are strictly better. Ids that
    /// are free or inside `b` need none: they get theirs when they are created or exposed.
    fn choose_edges(&mut self, b: usize, s: usize) {
        let row = self.row(b);
        for x in 1..=self.hi {
            let outer = self.top[x] as usize;
            if outer == 0 || outer == b {
                continue;
            }
            let (p, q) = self.edge(s, x);
            let slack = self.slack(p, q);
            if slack < self.best[x] {
                // A pair without an edge is taken too, but is replaced by the next candidate.
                let edge = self.twice[p * self.stride + q] > 0.0;
                self.best[x] = if edge { slack } else { f64::INFINITY };
                self.rep[row + x] = (p as u16, q as u16);
                if x > self.n {
                    let back = self.row(x) + b;
                    self.rep[back] = (q as u16, p as u16);
                }
            }
        }
    }

    pub(super) fn expand(&mut self, b: usize) {
        for i in 0..self.petals[b].len() {
            let z = self.petals[b][i] as usize;
            self.set_top(z, z);
        }
        let (inner, _) = self.edge(b, self.up[b] as usize);
        let r = self.home(b, inner);
        let i = self.seat(b, r);
        for j in (0..i).step_by(2) {
            let (s, t) = (self.petals[b][j] as usize, self.petals[b][j + 1] as usize);
            self.up[s] = self.edge(t, s).0 as u32;
            self.side[s] = ODD;
            self.side[t] = EVEN;
            self.forget_near(s);
            self.rescan(t);
            self.enqueue(t);
        }
        self.side[r] = ODD;
        self.up[r] = self.up[b];
        for j in i + 1..self.petals[b].len() {
            let x = self.petals[b][j] as usize;
            self.side[x] = UNSEEN;
            self.rescan(x);
        }
        self.top[b] = 0;
        self.rekey();
    }
}
