//! Numbers that exist: never NaN, never infinite, never below a bound, never above one. What worlds
//! report, what users declare and what a journal holds are such numbers, so that every line that is
//! written can be read again.
//!
//! Input is checked (`TryFrom`). A computed value becomes the nearest number that exists (`of`).
//! Arithmetic leaves the type: sums and quotients are plain floats, until something is reported.
//!
//! ```
//! use roommate_core::number::{Number, Positive};
//! let (steps, step_s) = (Number::of(10.0), Positive::of(0.5));
//! assert_eq!(steps * step_s, 5.0);
//! assert_eq!(Number::of(1.0 / 0.0), Number::MOST);
//! assert!(Number::try_from(-5.0).is_err());
//! ```

use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;
use std::ops::{Add, Div, Mul, Sub};

/// A number that does not exist: it is not finite, or it is out of the bounds of its type.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("expected a number from {least:?} to {most:e}, found {found:?}")]
pub struct OutOfRange {
    /// What was given.
    pub found: f64,
    /// The least of the type.
    pub least: f64,
    /// The most of the type.
    pub most: f64,
}

macro_rules! bounded {
    ($(#[$doc:meta])* $name:ident of $float:ident, from $least:literal to $most:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Serialize)]
        #[serde(transparent)]
        pub struct $name($float);

        impl $name {
            /// The least that exists.
            pub const LEAST: Self = Self($least);
            /// The most that exists.
            pub const MOST: Self = Self($most);

            /// The nearest number that exists; not a number becomes the least.
            #[inline]
            pub const fn of(value: $float) -> Self {
                // In this order NaN is not above the least, and the negative zero becomes positive.
                if value > $least { Self(value.min($most)) } else { Self($least) }
            }

            /// Its value.
            #[inline]
            pub const fn get(self) -> $float {
                self.0
            }
        }

        impl TryFrom<$float> for $name {
            type Error = OutOfRange;
            fn try_from(value: $float) -> Result<Self, OutOfRange> {
                let known = ($least..=$most).contains(&value);
                let (found, least, most) = (value.into(), Self::LEAST.into(), Self::MOST.into());
                known.then(|| Self::of(value)).ok_or(OutOfRange { found, least, most })
            }
        }

        /// A number above 0 that is beyond the bounds becomes the nearest, because journals of
        /// before may hold one.
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let found = $float::deserialize(from)?;
                let near = found > 0.0 && found.is_finite();
                let number = if near { Ok(Self::of(found)) } else { Self::try_from(found) };
                number.map_err(serde::de::Error::custom)
            }
        }

        impl From<$name> for f64 {
            #[inline]
            fn from(number: $name) -> Self {
                number.0.into()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }

        /// Equal to every number of the same value.
        impl<T: Copy + Into<f64>> PartialEq<T> for $name {
            #[inline]
            fn eq(&self, other: &T) -> bool {
                f64::from(*self) == (*other).into()
            }
        }

        impl<T: Copy + Into<f64>> PartialOrd<T> for $name {
            #[inline]
            fn partial_cmp(&self, other: &T) -> Option<std::cmp::Ordering> {
                f64::from(*self).partial_cmp(&(*other).into())
            }
        }

        bounded!(@arithmetic $name Add add, Sub sub, Mul mul, Div div);
    };
    (@arithmetic $name:ident $($trait:ident $method:ident),*) => {$(
        impl<T: Into<f64>> $trait<T> for $name {
            type Output = f64;
            #[inline]
            fn $method(self, other: T) -> f64 {
                $trait::$method(f64::from(self), other.into())
            }
        }

        impl $trait<$name> for f64 {
            type Output = f64;
            #[inline]
            fn $method(self, other: $name) -> f64 {
                $trait::$method(self, f64::from(other))
            }
        }
    )*};
}

bounded! {
    /// An amount: steps, seconds, requests per second, MiB. Whole numbers up to the most are exact.
    #[derive(Default)]
    Number of f64, from 0.0 to 1e15
}

bounded! {
    /// An amount that something is divided by: the seconds of a step, a relative speed.
    Positive of f64, from 1e-9 to 1e15
}

bounded! {
    /// A [`Number`] of less precision, as counters and measurements are written.
    #[derive(Default)]
    Number32 of f32, from 0.0 to 1e15
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn computed_values_become_the_nearest_number_that_exists() {
        for (value, near) in [
            (f64::NAN, 0.0_f64),
            (-1.0, 0.0),
            (-0.0, 0.0),
            (1e-320, 1e-320),
            (2.5, 2.5),
            (1e300, 1e15),
            (f64::INFINITY, 1e15),
        ] {
            assert_eq!(Number::of(value), near, "{value}");
            assert_eq!(Positive::of(value), near.max(1e-9), "{value}");
            assert_eq!(Number32::of(value as f32), Number32::of(near as f32), "{value}");
        }
        assert!(Number::of(-0.0).get().is_sign_positive());
    }

    #[test]
    fn input_out_of_bounds_is_refused_with_the_bounds() {
        assert_eq!(Number::try_from(1e15), Ok(Number::MOST));
        let error = |value: f64| Number::try_from(value).unwrap_err().to_string();
        assert_eq!(error(-5.0), "expected a number from 0.0 to 1e15, found -5.0");
        assert_eq!(error(f64::NAN), "expected a number from 0.0 to 1e15, found NaN");
        assert!(Number::try_from(1.1e15).is_err() && Number::try_from(f64::INFINITY).is_err());
        assert!(Positive::try_from(0.0).is_err() && Positive::try_from(1e-320).is_err());
        assert!(Number32::try_from(f32::INFINITY).is_err());
    }

    #[test]
    fn what_is_written_reads_back() {
        let read = |text: &str| serde_json::from_str::<Number>(text).map_err(|e| e.to_string());
        assert_eq!(serde_json::to_string(&Number::of(0.1)).unwrap(), "0.1");
        assert_eq!(serde_json::to_string(&Number32::of(0.1)).unwrap(), "0.1");
        assert_eq!(read("0.1"), Ok(Number::of(0.1)));
        assert_eq!(read("1e300"), Ok(Number::MOST));
        assert!(read("-1").unwrap_err().starts_with("expected a number from 0.0 to 1e15"));
        assert!(read("null").is_err());
        let read = |text: &str| serde_json::from_str::<Positive>(text);
        assert_eq!(read("1e-320").unwrap(), Positive::LEAST);
        assert!(read("0").is_err());
    }

    #[test]
    fn arithmetic_and_comparison_are_those_of_floats() {
        let (two, half) = (Number::of(2.0), Positive::of(0.5));
        assert_eq!((two + half, two - half, two * half, two / half), (2.5, 1.5, 1.0, 4.0));
        assert_eq!((1.0 + two, 1.0 - half, 3.0 * two, 1.0 / half), (3.0, 0.5, 6.0, 2.0));
        assert!(two > half && two > 1.5 && half < 0.6 && two != half);
        assert_eq!(format!("{two:.1} {half:?}"), "2.0 0.5");
    }
}
