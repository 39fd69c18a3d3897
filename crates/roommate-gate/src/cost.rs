//! How long kernels take on the GPU, learned from the times of groups of them.
//!
//! Only the time of a whole group is seen. What it took more or less than expected is given to all
//! its kernels in proportion; those that are seldom together get their own times in the end.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Kernels that are known at a time, and places at which one may be.
const KNOWN: usize = 2048;
const PROBED: usize = 4;
/// What is expected of a kernel that is not known, and the bounds of what is learned, ns.
const FIRST_NS: u64 = 43_750;
const LEAST_NS: f64 = 500.0;
const MOST_NS: f64 = 1e9;
/// How far one group changes what is expected: by this power of the difference, and for the first
/// groups of a kernel up to all the way.
const NEW: u64 = 3;
const RATE: f64 = 0.25;
const MOST_CHANGE: f64 = 8.0;

const NS_BITS: u32 = 32;
const SEEN_BITS: u32 = 2;

/// What is known of a kernel, in one word: a part of its name, how often it was learned from, up to
/// [`NEW`], and what it takes, ns.
pub(crate) struct Costs {
    words: [AtomicU64; KNOWN],
}

impl Costs {
    pub(crate) const fn new() -> Self {
        Self { words: [const { AtomicU64::new(0) }; KNOWN] }
    }

    /// The place of a kernel, and what it is expected to take, ns.
    pub(crate) fn expect(&self, kernel: u64) -> (u16, u64) {
        let mixed = kernel.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let first = (mixed >> 48) as usize;
        let name = (mixed << 16) >> (NS_BITS + SEEN_BITS);
        let mut free = first % KNOWN;
        for place in (first..first + PROBED).rev().map(|place| place % KNOWN) {
            let (known, seen, ns) = parts(self.words[place].load(Relaxed));
            if ns > 0 && known == name {
                return (place as u16, ns);
            }
            // One that was never learned from makes room first.
            if seen == 0 {
                free = place;
            }
        }
        self.words[free].store(packed(name, 0, FIRST_NS), Relaxed);
        (free as u16, FIRST_NS)
    }

    /// The kernels at these places were expected to take `expected_ns` together; they took
    /// `took_ns`.
    pub(crate) fn learn(&self, places: &[u16], expected_ns: u64, took_ns: u64) {
        let ratio = took_ns.max(1) as f64 / expected_ns.max(1) as f64;
        let ratio = ratio.clamp(1.0 / MOST_CHANGE, MOST_CHANGE);
        let slow = ratio.powf(RATE);
        for (at, place) in places.iter().enumerate() {
            // Once for each kernel of the group.
            if places[..at].contains(place) {
                continue;
            }
            let word = &self.words[usize::from(*place) % KNOWN];
            let (name, seen, ns) = parts(word.load(Relaxed));
            // At first all the way, but only up: a process that is not limited for a moment is far
            // ahead, one that is limited too much loses little.
            let change = if seen < NEW && ratio > 1.0 { ratio } else { slow };
            let ns = (ns as f64 * change).clamp(LEAST_NS, MOST_NS) as u64;
            word.store(packed(name, (seen + 1).min(NEW), ns), Relaxed);
        }
    }
}

fn packed(name: u64, seen: u64, ns: u64) -> u64 {
    name << (NS_BITS + SEEN_BITS) | seen << NS_BITS | ns
}

fn parts(word: u64) -> (u64, u64, u64) {
    let low = |bits: u32| (1_u64 << bits) - 1;
    (word >> (NS_BITS + SEEN_BITS), word >> NS_BITS & low(SEEN_BITS), word & low(NS_BITS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_known_by_its_name() {
        let costs = Costs::new();
        let (place, ns) = costs.expect(5);
        assert_eq!(ns, FIRST_NS);
        costs.learn(&[place], FIRST_NS, 2 * FIRST_NS);
        assert_eq!(costs.expect(5), (place, 2 * FIRST_NS));
    }

    #[test]
    fn kernels_do_not_share_a_place_until_there_are_many() {
        let costs = Costs::new();
        let places = |costs: &Costs| (0..300).map(|k| costs.expect(k << 8).0).collect::<Vec<_>>();
        let first = places(&costs);
        for place in &first {
            costs.learn(&[*place], 1, 1);
        }
        assert_eq!(places(&costs), first);
        let mut sorted = first;
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), 300);
        // Too many replace each other.
        (0..100_000).for_each(|k| assert!(costs.expect(k).1 >= LEAST_NS as u64));
    }

    #[test]
    fn one_strange_group_changes_little_of_what_is_known_well() {
        let costs = Costs::new();
        let (place, _) = costs.expect(5);
        (0..4).for_each(|_| costs.learn(&[place], 1, 1));
        costs.learn(&[place, place], FIRST_NS, u64::MAX);
        let (_, ns) = costs.expect(5);
        assert!(ns < 2 * FIRST_NS, "{ns}");
        costs.learn(&[place], u64::MAX, 0);
        assert!(costs.expect(5).1 >= LEAST_NS as u64);
    }
}
