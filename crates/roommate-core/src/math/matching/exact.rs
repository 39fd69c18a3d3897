//! Our own matcher: symmetric weights, exact arithmetic, mutual answers.
//!
//! The published search loses its guarantees to rounding: an edge can be tight from one side only.
//! Here every weight is first rounded to a whole number of steps of 2⁻³⁹ of the largest (a power of
//! two, so dyadic weights stay exact). Labels, slacks and halves of slacks are then whole numbers
//! below 2⁵³, `f64` holds them exactly, and the search ends at a true maximum of the rounded
//! weights: at most `n · 2⁻⁴⁰` of the largest weight below the maximum of the given ones.

use super::released::{MAX_VERTICES, Matcher, NONE};

/// The largest weight is in `[2³⁹, 2⁴⁰)` steps, so that sums of labels fit in 53 bits.
const TOP_BIT: i64 = 39;

/// A power of two that takes weights up to `largest` to whole numbers of steps.
pub(super) fn scale(largest: f64) -> f64 {
    let exponent = ((largest.to_bits() >> 52) as i64 - 1023).max(-900);
    f64::from_bits(((1023 + TOP_BIT - exponent) as u64) << 52)
}

/// A maximum-weight matcher for symmetric weights; buffers are reused.
#[derive(Clone, Debug)]
pub struct Exact {
    search: Matcher,
    weights: Vec<f64>,
}

impl Default for Exact {
    fn default() -> Self {
        Self::new()
    }
}

impl Exact {
    /// A matcher with empty buffers.
    pub fn new() -> Self {
        Self { search: Matcher::exact(), weights: Vec::new() }
    }

    /// Partner of each of the vertices `0..n`, or [`NONE`]; always mutual.
    ///
    /// `weight` is asked once for each `u < v` and means both directions; 0 is no edge.
    pub fn solve(&mut self, n: usize, weight: impl Fn(usize, usize) -> f64) -> &[u32] {
        assert!(n <= MAX_VERTICES, "a graph has at most {MAX_VERTICES} vertices");
        self.weights.clear();
        self.weights.resize(n * n, 0.0);
        let mut largest = 0.0f64;
        for u in 0..n {
            for v in u + 1..n {
                let w = weight(u, v);
                assert!((0.0..f64::INFINITY).contains(&w), "weights are finite and not negative");
                self.weights[u * n + v] = w;
                largest = largest.max(w);
            }
        }
        let scale = scale(largest);
        for u in 0..n {
            for v in u + 1..n {
                let steps = (self.weights[u * n + v] * scale).round();
                self.weights[u * n + v] = steps;
                self.weights[v * n + u] = steps;
            }
        }
        let mates = self.search.solve(n, |u, v| self.weights[u * n + v]);
        assert_mutual(mates);
        mates
    }

    /// As [`Exact::solve`] for weights that are whole numbers already; settled, to ask for prices.
    pub(super) fn prove(&mut self, n: usize, steps: impl Fn(usize, usize) -> f64) -> &Matcher {
        assert_mutual(self.search.solve(n, steps));
        self.search.settle();
        &self.search
    }
}

fn assert_mutual(mates: &[u32]) {
    let points_back = |(u, &v): (usize, &u32)| v == NONE || mates[v as usize] as usize == u;
    assert!(mates.iter().enumerate().all(points_back), "symmetric weights give mutual pairs");
}
