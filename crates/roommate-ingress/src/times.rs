//! How long batches take, learned from the last ones.

use std::time::Duration;

/// Values that are remembered.
const KEPT: usize = 64;

/// The last values of a quantity.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recent {
    values: Vec<f64>,
    /// The oldest value, once there are enough.
    oldest: usize,
}

impl Recent {
    pub(crate) fn learn(&mut self, value: f64) {
        if self.values.len() < KEPT {
            self.values.push(value);
        } else {
            self.values[self.oldest] = value;
            self.oldest = (self.oldest + 1) % KEPT;
        }
    }

    /// How many of the last values are known.
    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }

    /// The value that this part of the last ones does not exceed; `None` without values.
    pub(crate) fn quantile(&self, part: f64) -> Option<f64> {
        let len = self.values.len();
        let at = ((len as f64 * part).ceil() as usize).saturating_sub(1).min(len.checked_sub(1)?);
        let mut sorted = [0.0; KEPT];
        sorted[..len].copy_from_slice(&self.values);
        Some(*sorted[..len].select_nth_unstable_by(at, f64::total_cmp).1)
    }
}

/// Sizes are learned in powers of two.
pub(crate) const CLASSES: usize = 17;

pub(crate) fn class(size: u64) -> usize {
    (size.max(1).next_power_of_two().trailing_zeros() as usize).min(CLASSES - 1)
}

/// How long batches take, by size.
#[derive(Clone, Debug, Default)]
pub(crate) struct BatchTime {
    seconds: [Option<Seconds>; CLASSES],
}

#[derive(Clone, Debug, Default)]
struct Seconds {
    mean: f64,
    /// Mean distance from the mean.
    spread: f64,
    recent: Recent,
}

/// How many spreads above the mean the upper quantile is.
const UPPER: f64 = 2.0;
/// The quantile of the tail, and how many values it takes to speak of one.
const TAIL: f64 = 0.98;
const TAIL_OF: usize = 16;

impl BatchTime {
    pub(crate) fn learn(&mut self, rows: u64, time: Duration) {
        let seconds = time.as_secs_f64();
        let first = || Seconds { mean: seconds, spread: 0.25 * seconds, ..Seconds::default() };
        let known = self.seconds[class(rows)].get_or_insert_with(first);
        known.spread = 0.9 * known.spread + 0.1 * (seconds - known.mean).abs();
        known.mean = 0.8 * known.mean + 0.2 * seconds;
        known.recent.learn(seconds);
    }

    /// The next known size, larger first: a larger batch takes longer, so it is on the safe side.
    fn known(&self, rows: u64) -> Option<&Seconds> {
        let class = class(rows);
        let above = self.seconds[class..].iter().flatten().next();
        above.or_else(|| self.seconds[..class].iter().rev().flatten().next())
    }

    pub(crate) fn of(&self, rows: u64) -> Duration {
        Duration::from_secs_f64(self.known(rows).map_or(0.0, |k| k.mean))
    }

    pub(crate) fn at_most(&self, rows: u64) -> Option<Duration> {
        self.known(rows).map(|k| Duration::from_secs_f64(k.mean + UPPER * k.spread))
    }

    /// What nearly no batch of this size exceeds; `None` where too few of this or a larger size
    /// are known.
    pub(crate) fn tail(&self, rows: u64) -> Option<Duration> {
        let enough = |k: &&Seconds| k.recent.len() >= TAIL_OF;
        let known = self.seconds[class(rows)..].iter().flatten().find(enough)?;
        let tail = known.recent.quantile(TAIL)?.max(known.mean + UPPER * known.spread);
        Some(Duration::from_secs_f64(tail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_last_values() {
        let mut recent = Recent::default();
        assert_eq!((recent.len(), recent.quantile(0.5)), (0, None));
        recent.learn(7.0);
        assert_eq!((recent.quantile(0.0), recent.quantile(1.0)), (Some(7.0), Some(7.0)));
        (0..1000).for_each(|i| recent.learn(f64::from(i)));
        assert_eq!((recent.len(), recent.quantile(0.5)), (64, Some(967.0)));
        assert_eq!((recent.quantile(0.98), recent.quantile(1.0)), (Some(998.0), Some(999.0)));
    }

    #[test]
    fn the_tail_of_a_size_is_known_after_a_few_batches() {
        let (mut time, ms) = (BatchTime::default(), Duration::from_millis);
        (0..15).for_each(|_| time.learn(8, ms(10)));
        assert_eq!(time.tail(8), None);
        time.learn(8, ms(40));
        assert!(time.tail(8) >= Some(ms(40)) && time.tail(3) == time.tail(8));
        assert_eq!(time.tail(9), None, "smaller batches say nothing of the tail of larger ones");
    }
}
