//! Scaling points of the cones: for signs `s` and `z` are numbers, for a second-order cone vectors.

use super::{Block, Program};

/// The scaling of one second-order cone, W = η · [[a, qᵀ], [q, I + q·qᵀ ÷ (1 + a)]], and its square
/// as η² · (diagonal + u·uᵀ − v·vᵀ), which avoids cancellation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cone {
    pub(super) eta2: f64,
    eta: f64,
    a: f64,
    q: [f64; 2],
    /// First element of the diagonal; the others are 1.
    first: f64,
    pub(super) u: [f64; 3],
    pub(super) v: [f64; 3],
}

impl Cone {
    const NONE: Self =
        Self { eta2: 1.0, eta: 1.0, a: 1.0, q: [0.0; 2], first: 1.0, u: [0.0; 3], v: [0.0; 3] };

    /// The point between `s` and `z`; `None` if one of them has left the cone.
    fn between(s: &[f64], z: &[f64]) -> Option<Self> {
        let rest = |x: &[f64]| x[0] * x[0] - x[1] * x[1] - x[2] * x[2];
        let (of_s, of_z) = (rest(s), rest(z));
        if !(of_s > 0.0 && of_z > 0.0) {
            return None;
        }
        let (of_s, of_z) = (of_s.sqrt(), of_z.sqrt());
        let product: f64 = s.iter().zip(z).map(|(s, z)| s / of_s * (z / of_z)).sum();
        let half = 0.5 / (0.5 * (1.0 + product)).sqrt();
        let a = half * (s[0] / of_s + z[0] / of_z);
        let q = [1, 2].map(|i| half * (s[i] / of_s - z[i] / of_z));
        let w = q[0] * q[0] + q[1] * q[1];
        let more = 1.0 + a;
        let c = more + w / more;
        let d = 1.0 + 2.0 / more + w / (more * more);
        let first = (0.5 * (a * a + w * (1.0 - c * c / (1.0 + w * d)))).max(0.0);
        let u0 = (a * a + w - first).sqrt();
        let u1 = c / u0;
        let v1 = u1 * u1 - d;
        if v1.is_nan() || v1 <= 0.0 {
            return None;
        }
        let v1 = v1.sqrt();
        let (eta2, eta) = (of_s / of_z, (of_s / of_z).sqrt());
        let (u, v) = ([u0, u1 * q[0], u1 * q[1]], [0.0, v1 * q[0], v1 * q[1]]);
        Some(Self { eta2, eta, a, q, first, u, v })
    }

    pub(super) fn diagonal(&self, i: usize) -> f64 {
        if i == 0 { self.first } else { 1.0 }
    }

    /// W · x.
    fn times(&self, x: &[f64]) -> [f64; 3] {
        let along = self.q[0] * x[1] + self.q[1] * x[2];
        let factor = x[0] + along / (1.0 + self.a);
        [
            self.eta * (self.a * x[0] + along),
            self.eta * (x[1] + factor * self.q[0]),
            self.eta * (x[2] + factor * self.q[1]),
        ]
    }
}

fn length([a, b]: [f64; 2]) -> f64 {
    (a * a + b * b).sqrt()
}

/// The inverse of the largest step along `change` from `lambda` within the cone.
fn nearest_edge(lambda: &[f64], change: &[f64]) -> f64 {
    let size2 = lambda[0] * lambda[0] - lambda[1] * lambda[1] - lambda[2] * lambda[2];
    if size2.is_nan() || size2 <= 0.0 {
        return 0.0;
    }
    let size = size2.sqrt();
    let unit = [0, 1, 2].map(|i| lambda[i] / size);
    let along = unit[0] * change[0] - unit[1] * change[1] - unit[2] * change[2];
    let factor = (along + change[0]) / (unit[0] + 1.0);
    let across = [1, 2].map(|i| (change[i] - factor * unit[i]) / size);
    length(across) - along / size
}

/// Scalings of all rows.
#[derive(Clone, Debug)]
pub(super) struct Scaling {
    /// W of the rows that are signs.
    w: Vec<f64>,
    /// 1 ÷ λ of these.
    inverse: Vec<f64>,
    /// Its square; nothing for the rows of cones.
    pub(super) square: Vec<f64>,
    pub(super) cones: Vec<Cone>,
}

impl Scaling {
    /// No scaling.
    pub(super) fn new(program: &Program) -> Self {
        let rows = program.bounds.len();
        let cones = if program.shape.cone { program.blocks.len() } else { 0 };
        let mut square = vec![1.0; rows];
        for block in &program.blocks[..cones] {
            square[program.cone_of(block)..][..3].fill(0.0);
        }
        let (w, inverse) = (vec![1.0; rows], vec![1.0; rows]);
        Self { w, inverse, square, cones: vec![Cone::NONE; cones] }
    }

    fn with_cones<'a>(&'a self, p: &'a Program) -> impl Iterator<Item = (usize, &'a Cone)> {
        p.blocks.iter().map(|b: &Block| p.cone_of(b)).zip(&self.cones)
    }

    /// Scalings at a point, and W · z; `false` if it has left the cones.
    pub(super) fn update(&mut self, p: &Program, s: &[f64], z: &[f64], lambda: &mut [f64]) -> bool {
        let out = self.square.iter_mut().zip(&mut self.w);
        for ((square, w), (s, z)) in out.zip(s.iter().zip(z)) {
            *square = s / z;
            *w = square.sqrt();
        }
        for (cone, block) in self.cones.iter_mut().zip(&p.blocks) {
            let at = p.cone_of(block);
            let Some(found) = Cone::between(&s[at..at + 3], &z[at..at + 3]) else { return false };
            *cone = found;
            self.square[at..at + 3].fill(0.0);
        }
        self.times(p, z, lambda);
        for (inverse, lambda) in self.inverse.iter_mut().zip(lambda) {
            *inverse = 1.0 / *lambda;
        }
        true
    }

    /// W · x.
    pub(super) fn times(&self, p: &Program, x: &[f64], out: &mut [f64]) {
        for ((out, x), w) in out.iter_mut().zip(x).zip(&self.w) {
            *out = w * x;
        }
        for (at, cone) in self.with_cones(p) {
            out[at..at + 3].copy_from_slice(&cone.times(&x[at..at + 3]));
        }
    }

    /// The largest step within all cones, in scaled terms.
    pub(super) fn reach(&self, p: &Program, lambda: &[f64], s: &[f64], z: &[f64]) -> f64 {
        let mut nearest = 0.0_f64;
        let mut from = 0;
        let mut signs = |to: usize| {
            let both = s[from..to].iter().zip(&z[from..to]);
            for ((s, z), inverse) in both.zip(&self.inverse[from..to]) {
                let edge = -(if s < z { s } else { z }) * inverse;
                nearest = if edge > nearest { edge } else { nearest };
            }
            from = to + 3;
        };
        for (at, _) in self.with_cones(p) {
            signs(at);
        }
        signs(lambda.len());
        for (at, _) in self.with_cones(p) {
            let of = |change: &[f64]| nearest_edge(&lambda[at..at + 3], &change[at..at + 3]);
            nearest = nearest.max(of(s)).max(of(z));
        }
        1.0 / nearest
    }

    /// λ \ (λ∘λ + s∘z − μ·e): the correction of a step so that all products become `mu`.
    pub(super) fn corrected(
        &self,
        p: &Program,
        lambda: &[f64],
        s: &[f64],
        z: &[f64],
        mu: f64,
        out: &mut [f64],
    ) {
        let of_rows = lambda.iter().zip(&self.inverse).zip(s.iter().zip(z));
        for (out, ((lambda, inverse), (s, z))) in out.iter_mut().zip(of_rows) {
            *out = lambda + (s * z - mu) * inverse;
        }
        for (at, _) in self.with_cones(p) {
            let [l, s, z] = [lambda, s, z].map(|v| [v[at], v[at + 1], v[at + 2]]);
            let squared = product(l, l);
            let mixed = product(s, z);
            let mut sum = [0, 1, 2].map(|i| squared[i] + mixed[i]);
            sum[0] -= mu;
            out[at..at + 3].copy_from_slice(&quotient(l, sum));
        }
    }

    /// Moves a vector into the cones if it is outside.
    pub(super) fn bring_inside(&self, p: &Program, v: &mut [f64]) {
        let mut outside = -super::search::BOLDNESS;
        let mut from = 0;
        let mut depth = |depth: f64| {
            if depth <= 0.0 {
                outside = outside.max(-depth);
            }
        };
        for (at, _) in self.with_cones(p) {
            v[from..at].iter().for_each(|x| depth(*x));
            depth(v[at] - length([v[at + 1], v[at + 2]]));
            from = at + 3;
        }
        v[from..].iter().for_each(|x| depth(*x));
        let by = 1.0 + outside;
        v.iter_mut().for_each(|x| *x += by);
        for (at, _) in self.with_cones(p) {
            v[at + 1] -= by;
            v[at + 2] -= by;
        }
    }
}

/// The product of the cone's algebra.
fn product(a: [f64; 3], b: [f64; 3]) -> [f64; 3] {
    let all = a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
    [all, a[0] * b[1] + b[0] * a[1], a[0] * b[2] + b[0] * a[2]]
}

/// x with a ∘ x = b.
fn quotient(a: [f64; 3], b: [f64; 3]) -> [f64; 3] {
    let size = a[0] * a[0] - a[1] * a[1] - a[2] * a[2];
    let along = a[1] * b[1] + a[2] * b[2];
    let factor = (along / a[0] - b[0]) / size;
    [(a[0] * b[0] - along) / size, factor * a[1] + b[1] / a[0], factor * a[2] + b[2] / a[0]]
}
