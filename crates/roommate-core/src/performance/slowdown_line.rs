//! Slowdown by roommates as a linear function of what both use, fitted to measurements.

/// Busy shares of the SMs and of the memory bandwidth.
pub type Use = [f64; 2];

/// Slowdown minus 1 as a linear function of two products of utilisations, fitted by least squares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlowdownLine {
    /// Sums of products of the two inputs x and y: x², xy, y².
    inputs: [f64; 3],
    /// Sums of each input × (measured slowdown minus 1).
    outcomes: [f64; 2],
}

impl Default for SlowdownLine {
    fn default() -> Self {
        Self { inputs: [Self::PRIOR, 0.0, Self::PRIOR], outcomes: [Self::PRIOR; 2] }
    }
}

impl SlowdownLine {
    /// Weight of the prior, in measurements. Before the first measurement, each product predicts a
    /// slowdown of 1 plus its own value: two jobs that fill only the SMs take twice as long.
    const PRIOR: f64 = 2.0;

    /// Takes in the products of two utilisations, and the slowdown minus 1 that was measured.
    pub fn learn(&mut self, [x, y]: Use, slowdown: f64) {
        let add = [x * x, x * y, y * y];
        self.inputs.iter_mut().zip(add).for_each(|(sum, a)| *sum += a);
        self.outcomes[0] += x * slowdown;
        self.outcomes[1] += y * slowdown;
    }

    /// The slowdown minus 1 that is expected; a fit to few measurements may be below 0.
    pub fn predict(&self, [x, y]: Use) -> f64 {
        let ([a, b, d], [p, q]) = (self.inputs, self.outcomes);
        // The prior keeps the matrix from being singular.
        let determinant = a * d - b * b;
        (x * (d * p - b * q) + y * (a * q - b * p)) / determinant
    }
}
