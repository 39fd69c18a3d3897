//! Random draws: of this policy, or those of a run of the released simulator.

use crate::math::rng::Rng;
use crate::math::twister::Twister;

/// Source of random draws.
pub(crate) struct Draws {
    replay: Option<Replay>,
}

/// The released simulator has one generator for each purpose.
struct Replay {
    policy: Twister,
    order: Twister,
}

impl Draws {
    /// Draws of the released simulator with this seed, if there is one.
    pub(crate) fn of(seed: Option<u64>) -> Self {
        let replay = |seed: u64| Replay {
            policy: Twister::new(seed),
            order: Twister::new(seed.wrapping_add(5)),
        };
        Self { replay: seed.map(replay) }
    }

    /// A number below `n`.
    pub(crate) fn one_of(&mut self, n: usize, rng: &mut Rng) -> usize {
        match &mut self.replay {
            Some(replay) => replay.policy.below(n),
            None => rng.below(n as u64) as usize,
        }
    }

    /// Two different numbers below `n`.
    pub(crate) fn two_of(&mut self, n: usize, rng: &mut Rng) -> [usize; 2] {
        if let Some(replay) = &mut self.replay {
            return replay.policy.two_of(n);
        }
        let first = rng.below(n as u64) as usize;
        [first, (first + 1 + rng.below(n as u64 - 1) as usize) % n]
    }

    /// Shuffles the order.
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
