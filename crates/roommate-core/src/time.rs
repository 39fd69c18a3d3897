//! Time as a value: integer microseconds since the run began. The core never reads a clock.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::{Add, AddAssign, Sub};

/// An instant: µs since the run began.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Time(pub u64);

/// A length of time in µs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Span(pub u64);

impl Time {
    /// The beginning of the run.
    pub const ZERO: Self = Self(0);
    /// A thousand years: later than any run, and early enough for sums of times to fit.
    pub const LATEST: Self = Self(1_000 * 366 * 86_400 * 1_000_000);

    /// Seconds since the run began.
    pub fn secs(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// The instant `s` seconds into the run, to the nearest µs.
    pub fn from_secs(s: f64) -> Self {
        Self(Span::from_secs(s).0)
    }
}

impl Span {
    /// No time.
    pub const ZERO: Self = Self(0);

    /// Its length in seconds.
    pub fn secs(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// `s` seconds to the nearest µs; negative and NaN become zero, too large becomes the largest.
    pub fn from_secs(s: f64) -> Self {
        // `as` saturates, which is what is wanted at both ends.
        Self((s * 1e6).round() as u64)
    }

    /// The difference to `other`, at least zero.
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl Add<Span> for Time {
    type Output = Self;
    fn add(self, rhs: Span) -> Self {
        Self(self.0.saturating_add(rhs.0))
    }
}

impl AddAssign<Span> for Time {
    fn add_assign(&mut self, rhs: Span) {
        *self = *self + rhs;
    }
}

impl Sub for Time {
    type Output = Span;
    fn sub(self, rhs: Self) -> Span {
        Span(self.0.checked_sub(rhs.0).expect("time runs forward"))
    }
}

impl Add for Span {
    type Output = Self;
    fn add(self, rhs: Self) -> Self {
        Self(self.0.saturating_add(rhs.0))
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Span(self.0).fmt(f)
    }
}

impl fmt::Display for Span {
    /// The two largest units: `3d 04h`, `2h 05m`, `4m 10s`, `12.5s`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = self.0 / 1_000_000;
        let text = match s {
            0..=59 => format!("{:.1}s", self.secs()),
            60..=3_599 => format!("{}m {:02}s", s / 60, s % 60),
            3_600..=86_399 => format!("{}h {:02}m", s / 3_600, s % 3_600 / 60),
            _ => format!("{}d {:02}h", s / 86_400, s % 86_400 / 3_600),
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_round_to_the_nearest_microsecond_and_saturate() {
        assert_eq!(Span::from_secs(1.000_000_4), Span(1_000_000));
        assert_eq!(Span::from_secs(f64::NAN), Span::ZERO);
        assert_eq!(Span::from_secs(-1.0), Span::ZERO);
        assert_eq!(Time(1) + Span(u64::MAX), Time(u64::MAX));
    }

    #[test]
    fn spans_are_shown_in_their_two_largest_units() {
        let said: Vec<String> = [0, 12_500_000, 250_000_000, 7_500_000_000, 273_600_000_000]
            .map(|us| Span(us).to_string())
            .into();
        assert_eq!(said, ["0.0s", "12.5s", "4m 10s", "2h 05m", "3d 04h"]);
    }
}
