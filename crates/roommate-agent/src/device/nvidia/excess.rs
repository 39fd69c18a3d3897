//! Whether more of a GPU is busy than its tenants were given. MPS does not tell whose work keeps
//! an SM busy, so it is seen that somebody exceeds its part, not who.

/// Readings in a row that exceed what was given.
#[derive(Debug, Default)]
pub(crate) struct Excess {
    times: u32,
}

/// Steps move between SM ranges within a second or two, and then both ranges are busy.
const TIMES: u32 = 5;
/// SMs are assigned in groups, and counters are not exact.
const MARGIN: f64 = 0.1;

impl Excess {
    /// Looks at a new reading: the part of the SMs that was busy, and the part that all tenants
    /// together were given. Says so once, until it is over.
    pub(crate) fn look(&mut self, busy: f64, given: f64) -> Option<String> {
        self.times = if busy > given + MARGIN { self.times.saturating_add(1) } else { 0 };
        (self.times == TIMES).then(|| {
            format!(
                "{:.0}% of the SMs are busy, and its jobs were given {:.0}%: one does not keep to \
                 its seat",
                100.0 * busy,
                100.0 * given
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lasting_excess_is_told_once() {
        let mut excess = Excess::default();
        let mut told = |busy: f64, times: usize| {
            (0..times).filter_map(|_| excess.look(busy, 0.5)).collect::<Vec<_>>()
        };
        assert_eq!(told(0.58, 20), [""; 0], "within the margin");
        assert_eq!(told(0.9, 4), [""; 0], "a moment");
        assert_eq!(
            told(0.9, 20),
            ["90% of the SMs are busy, and its jobs were given 50%: one does not keep to its seat"]
        );
        assert_eq!(told(0.4, 1), [""; 0]);
        assert_eq!(told(0.9, 5).len(), 1, "again");
    }
}
