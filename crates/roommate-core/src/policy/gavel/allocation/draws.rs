//! Random choices: our own, or those of a run of the released simulator.

use crate::math::rng::Rng;
use crate::math::twister::Twister;

/// Where choices come from.
pub(crate) struct Draws {
    replay: Option<Replay>,
}

/// The released simulator seeds one generator for each use.
struct Replay {
    policy: Twister,
    order: Twister,
}

impl Draws {
    /// As the released simulator with this seed, if there is one.
    pub(crate) fn of(seed: Option<u64>) -> Self {
        let replay = |seed: u64| Replay {
            policy: Twister::new(seed),
            order: Twister::new(seed.wrapping_add(5)),
        };
        Self { replay: seed.map(replay) }
    }

    /// One of so many.
    pub(crate) fn one_of(&mut self, n: usize, rng: &mut Rng) -> usize {
        match &mut self.replay {
            Some(replay) => replay.policy.below(n),
            None => rng.below(n as u64) as usize,
        }
    }

    /// Two of so many.
    pub(crate) fn two_of(&mut self, n: usize, rng: &mut Rng) -> [usize; 2] {
        if let Some(replay) = &mut self.replay {
            return replay.policy.two_of(n);
        }
        let first = rng.below(n as u64) as usize;
        [first, (first + 1 + rng.below(n as u64 - 1) as usize) % n]
    }

    /// Any order.
    pub(crate) fn shuffle(&mut self, order: &mut [u8], rng: &mut Rng) {
        for i in (1..order.len()).rev() {
            let other = match &mut self.replay {
                Some(replay) => replay.order.below(i + 1),
                None => rng.below(i as u64 + 1) as usize,
            };
            order.swap(i, other);
        }
    }
}
