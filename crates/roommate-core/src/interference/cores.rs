//! Tenants of CPU cores: tenants that compute at the same time share the core equally; tenants that
//! wait (for IO, for data) slow down no other.
//!
//! A step alone consists of computing and of waiting. How often tenants compete for the core is a
//! closed queueing network of one processor-sharing station and one delay station, whose throughput
//! has an exact recursion over subsets of the tenants (mean-value analysis); for such stations only
//! the means matter, not the distributions.
//!
//! ```text
//! R_i(S) = c_i · (1 + Σ_{j ≠ i} Q_j(S − i))      time on the core; c: alone, w: waiting
//! Q_i(S) = R_i(S) / (R_i(S) + w_i)               presence on the core
//! speed  = (c_i + w_i) / (R_i + w_i)
//! ```
//!
//! A tenant with SM share 0 beside a guaranteed tenant computes only while the core is idle. A
//! tenant confined to a share takes at least that much longer. Tenants that interleave their stages
//! advance together as in [`stages`], without inflation.

use crate::idx::{IdxVec, JobIdx, ProfileIdx};
use crate::interference::stages::{Interleaved, SLOTS, Stages};
use crate::interference::{Estimate, Interference, Truth};
use crate::knobs::Knobs;
use crate::state::State;

/// Sharing of cores.
#[derive(Clone, Debug, PartialEq)]
pub struct Cores {
    /// Share of its time during which each profile computes when it runs alone, by profile index;
    /// profiles beyond the end always compute.
    pub busy: IdxVec<ProfileIdx, f64>,
    /// Data, compute and network seconds per step of each profile that marks its stages, by profile
    /// index.
    pub stages: IdxVec<ProfileIdx, Option<Stages>>,
}

/// The demand of one tenant for the core.
#[derive(Clone, Copy, Debug)]
struct Want {
    /// Share of a step alone that computes.
    busy: f64,
    /// Factor by which computing takes longer when confined to the tenant's share.
    stretch: f64,
    promised: bool,
}

impl Cores {
    /// Speed of tenant `index` among these; alone on the whole core = 1.
    fn speed_of(wants: &[Want], index: usize) -> f64 {
        let me = wants[index];
        let promised: Vec<Want> = wants.iter().copied().filter(|w| w.promised).collect();
        let (rivals, at) = if me.promised {
            (promised.clone(), wants[..index].iter().filter(|w| w.promised).count())
        } else {
            let others: Vec<Want> = wants.iter().copied().filter(|w| !w.promised).collect();
            (others, wants[..index].iter().filter(|w| !w.promised).count())
        };
        let mut core_s = Self::times(&rivals)[at];
        if !me.promised {
            // Guaranteed tenants leave only the rest of the core.
            let times = Self::times(&promised);
            let taken = promised.iter().zip(times).map(|(w, r)| w.busy / (r + 1.0 - w.busy));
            core_s /= (1.0 - taken.sum::<f64>()).max(0.01);
        }
        1.0 / (core_s.max(me.busy * me.stretch) + 1.0 - me.busy)
    }

    /// Time on the core per step of each of these tenants when all run.
    fn times(wants: &[Want]) -> Vec<f64> {
        let n = wants.len();
        // By subset: presence on the core of each member.
        let mut present = vec![vec![0.0; n]; 1 << n];
        let mut times = vec![0.0; n];
        for set in 1usize..1 << n {
            for (i, want) in wants.iter().enumerate().filter(|(i, _)| set >> i & 1 == 1) {
                let met: f64 = present[set & !(1 << i)].iter().sum();
                times[i] = want.busy * (1.0 + met);
                present[set][i] = times[i] / (times[i] + 1.0 - want.busy).max(1e-12);
            }
        }
        times
    }

    fn want(&self, state: &State, job: JobIdx, knobs: Knobs) -> Want {
        let busy = self.busy.get(state.spec(job).profile).copied().unwrap_or(1.0);
        Want {
            busy: busy.clamp(0.0, 1.0),
            stretch: 1.0 / knobs.reach().max(1e-3),
            promised: knobs.sm_permille > 0,
        }
    }
}

impl Truth for Cores {}

impl Interference for Cores {
    fn speed(&self, state: &State, _: u8, tenants: &[(JobIdx, Knobs)], index: usize) -> Estimate {
        if tenants.len() > 1 && tenants.iter().any(|(_, knobs)| knobs.stage > 0) {
            let turns = Interleaved { inflation: [1.0; SLOTS + 1] };
            let stages = |job: JobIdx| *self.stages.get(state.spec(job).profile)?;
            let seated = tenants.iter().map(|(job, knobs)| (knobs.stage, stages(*job)));
            let together_s = turns.step_of(seated).filter(|s| *s > 0.0);
            if let Some((alone, together_s)) = stages(tenants[index].0).zip(together_s) {
                return Estimate::certain(alone.iter().sum::<f64>() / together_s);
            }
        }
        let wants: Vec<Want> =
            tenants.iter().map(|(job, knobs)| self.want(state, *job, *knobs)).collect();
        Estimate::certain(Self::speed_of(&wants, index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interference::testing::{state, whole};
    use crate::math::rng::Rng;

    fn speeds(busy: &[f64]) -> Vec<f64> {
        let profiles: Vec<ProfileIdx> = (0..busy.len() as u32).map(ProfileIdx).collect();
        let jobs: Vec<u32> = (0..busy.len() as u32).collect();
        let model = Cores { busy: busy.to_vec().into(), stages: IdxVec::new() };
        let state = state(&profiles);
        (0..busy.len()).map(|index| model.speed(&state, 0, &whole(&jobs), index).mean).collect()
    }

    #[test]
    fn computing_tenants_share_and_waiting_ones_do_not() {
        assert_eq!(speeds(&[1.0]), [1.0]);
        assert_eq!(speeds(&[1.0, 1.0]), [0.5, 0.5]);
        assert_eq!(speeds(&[0.0, 1.0]), [1.0, 1.0]);
        assert!(speeds(&[1.0; 4]).iter().all(|s| (s - 0.25).abs() < 1e-12));
    }

    #[test]
    fn gaps_and_shares() {
        let model = Cores { busy: vec![0.5, 1.0].into(), stages: IdxVec::new() };
        let state = state(&[ProfileIdx(0), ProfileIdx(1)]);
        let free = Knobs { sm_permille: 0, ..Knobs::WHOLE };
        let third = Knobs { sm_permille: 250, ..Knobs::WHOLE };
        let speed =
            |tenants: &[(JobIdx, Knobs)], index| model.speed(&state, 0, tenants, index).mean;
        let tenants = [(JobIdx(0), Knobs::WHOLE), (JobIdx(1), free)];
        assert_eq!((speed(&tenants, 0), speed(&tenants, 1)), (1.0, 0.5));
        assert_eq!(speed(&[(JobIdx(1), third)], 0), 0.25);
        // A step that waits for half of its time: only the other half takes longer.
        assert_eq!(speed(&[(JobIdx(0), third)], 0), 1.0 / 2.5);
    }

    #[test]
    fn stages_take_turns() {
        let model = Cores {
            busy: vec![0.1, 0.9].into(),
            stages: vec![Some([3.0, 1.0, 0.0]), Some([1.0, 2.0, 0.0])].into(),
        };
        let state = state(&[ProfileIdx(0), ProfileIdx(1)]);
        let second = Knobs { stage: 2, ..Knobs::WHOLE };
        let tenants = [(JobIdx(0), Knobs::WHOLE), (JobIdx(1), second)];
        // One loads for 3 while the other computes for 2, then both swap for 1.
        assert_eq!(model.speed(&state, 0, &tenants, 0).mean, 1.0);
        assert_eq!(model.speed(&state, 0, &tenants, 1).mean, 0.75);
    }

    /// The slow twin: a core that is divided in small slices among the tenants that compute.
    fn sliced(busy: &[f64], seed: u64) -> Vec<f64> {
        let mut rng = Rng::new(seed);
        let dt = 0.002;
        let n = busy.len();
        // Rest of the current part, and whether that part computes.
        let mut left: Vec<(f64, bool)> = busy.iter().map(|b| (b * rng.unit(), true)).collect();
        let mut done = vec![0.0; n];
        let rounds = 2_000_000;
        for _ in 0..rounds {
            let wanting = left.iter().filter(|l| l.1).count().max(1) as f64;
            for i in 0..n {
                left[i].0 -= if left[i].1 { dt / wanting } else { dt };
                if left[i].0 <= 0.0 {
                    let (was, part) = (left[i].1, 1.0 - busy[i]);
                    done[i] += if was { 0.0 } else { 1.0 };
                    // Parts vary a little, otherwise tenants would stay synchronized.
                    let length = if was { part } else { busy[i] };
                    left[i] = (left[i].0 + length * (0.75 + 0.5 * rng.unit()), !was);
                }
            }
        }
        done.iter().map(|d| d / (f64::from(rounds) * dt)).collect()
    }

    #[test]
    fn speeds_equal_those_of_a_core_divided_in_slices() {
        for (seed, busy) in [vec![0.5, 0.5], vec![0.8, 0.3], vec![0.6, 0.6, 0.4], vec![0.9, 0.9]]
            .into_iter()
            .enumerate()
        {
            let (fast, slow) = (speeds(&busy), sliced(&busy, seed as u64));
            for (f, s) in fast.iter().zip(&slow) {
                assert!((f - s).abs() < 0.04 * s, "{busy:?}: {fast:?} instead of {slow:?}");
            }
        }
    }
}
