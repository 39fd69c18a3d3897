//! Interleaving: jobs on the same GPUs use storage and CPU, GPU, and network in turn, each offset
//! by one stage, and advance in lock-step. The model of Muri (SIGCOMM 2022).
//!
//! A step is a cycle of four slots: data (storage and CPU) takes two of them, then compute, then
//! the exchange of gradients. A tenant's offset is its knob `stage`; the offsets of all tenants
//! determine the length of the common step, and policies choose them.

use crate::idx::JobIdx;
use crate::interference::{Estimate, Interference, Truth};
use crate::knobs::Knobs;
use crate::state::State;
use smallvec::SmallVec;

/// Most jobs in a group: one for each slot.
pub const SLOTS: usize = 4;

/// Data, compute and network seconds of one step of a job.
pub type Stages = [f64; 3];

/// The stage times of a job; `None` where they were not profiled, or are all zero.
pub fn of(state: &State, job: JobIdx) -> Option<Stages> {
    let [storage, cpu, gpu, network] = state.profile(job).stages_s?;
    let stages = [storage + cpu, gpu.get(), network.get()];
    (stages.iter().sum::<f64>() > 0.0).then_some(stages)
}

/// Seconds of the common step of jobs at offsets 0, 1, 2, …
///
/// `end[s]` is when slot `s` ends; a slot ends when all work in it is done. After a few slots the
/// pattern repeats, and its length is the step.
pub fn step_in_order(jobs: &[Stages]) -> f64 {
    debug_assert!((1..=SLOTS).contains(&jobs.len()), "a group has one to four jobs");
    let mut end = [0.0f64; 2 * SLOTS + 1];
    for s in 0..2 * SLOTS {
        let mut last: f64 = 0.0;
        if let Some([_, _, network]) = jobs.get((s + 1) % SLOTS) {
            last = last.max(end[s] + network);
        }
        if let Some([_, compute, _]) = jobs.get((s + 2) % SLOTS) {
            last = last.max(end[s] + compute);
        }
        if let Some([data, _, _]) = jobs.get((s + 3) % SLOTS).filter(|_| s > 0) {
            last = last.max(end[s - 1] + data);
        }
        end[s + 1] = last;
        if s >= SLOTS {
            let cycle = end[s + 1] - end[s + 1 - SLOTS];
            let before = end[s] - end[s - SLOTS];
            if is_close(cycle, before) {
                return if cycle > 0.0 { cycle } else { end[2 * SLOTS] - end[SLOTS] };
            }
        }
    }
    end[2 * SLOTS] - end[SLOTS]
}

/// Seconds of the common step of two jobs half a cycle apart (offsets 0 and 2).
pub fn step_opposite([a, b]: [Stages; 2]) -> f64 {
    a[0].max(b[1] + b[2]) + b[0].max(a[1] + a[2])
}

fn is_close(a: f64, b: f64) -> bool {
    a == b || (a - b).abs() <= 1e-3 * a.abs().max(b.abs())
}

/// The offsets of the members of a group, and the length of their common step.
#[derive(Clone, Debug, PartialEq)]
pub struct Seating {
    /// Offset of each member, in the given order.
    pub offsets: SmallVec<[u8; SLOTS]>,
    /// Seconds of the common step, before any inflation.
    pub step_s: f64,
}

/// The best (or worst) offsets of two to four jobs; the first of equals.
pub fn seat(jobs: &[Stages], worst: bool) -> Seating {
    let mut order: SmallVec<[usize; SLOTS]> = (0..jobs.len()).collect();
    let mut best: Option<Seating> = None;
    let mut consider = |offsets: SmallVec<[u8; SLOTS]>, step_s: f64| {
        let better =
            best.as_ref().is_none_or(|b| if worst { step_s > b.step_s } else { step_s < b.step_s });
        if better {
            best = Some(Seating { offsets, step_s });
        }
    };
    loop {
        let seated: SmallVec<[Stages; SLOTS]> = order.iter().map(|i| jobs[*i]).collect();
        let mut offsets: SmallVec<[u8; SLOTS]> = SmallVec::from_elem(0, jobs.len());
        for (offset, member) in order.iter().enumerate() {
            offsets[*member] = offset as u8;
        }
        consider(offsets, step_in_order(&seated));
        if !next_permutation(&mut order) {
            break;
        }
    }
    if let [a, b] = jobs {
        consider(SmallVec::from_slice(&[0, 2]), step_opposite([*a, *b]));
    }
    best.expect("at least one order was considered")
}

/// Goes to the next permutation in lexicographic order; false after the last.
fn next_permutation(order: &mut [usize]) -> bool {
    let Some(i) = order.windows(2).rposition(|w| w[0] < w[1]) else { return false };
    let j = order.iter().rposition(|x| *x > order[i]).expect("one after i is larger");
    order.swap(i, j);
    order[i + 1..].reverse();
    true
}

/// Roommates that interleave their stages, and advance together.
#[derive(Clone, Copy, Debug)]
pub struct Interleaved {
    /// Factor on the common step of a group, by number of jobs, for what the model leaves out.
    pub inflation: [f64; SLOTS + 1],
}

/// How much longer groups of 2, 3 and 4 jobs take than the model says: the ratios that Muri's
/// authors fitted on their testbed (1.33, 1.50 and 1.37 over the 1.015 of a job alone).
pub const INFLATION: [f64; 3] = [1.33 / 1.015, 1.50 / 1.015, 1.37 / 1.015];

impl Default for Interleaved {
    fn default() -> Self {
        let [two, three, four] = INFLATION;
        Self { inflation: [1.0, 1.0, two, three, four] }
    }
}

impl Interleaved {
    /// Seconds of the common step of these tenants at their offsets; `None` outside the model.
    pub fn step_s(&self, state: &State, tenants: &[(JobIdx, Knobs)]) -> Option<f64> {
        self.step_of(tenants.iter().map(|(job, knobs)| (knobs.stage, of(state, *job))))
    }

    /// The common step for given offsets and stage times; `None` outside the model.
    pub fn step_of(&self, tenants: impl Iterator<Item = (u8, Option<Stages>)>) -> Option<f64> {
        let mut seats: [Option<Stages>; SLOTS] = [None; SLOTS];
        for (offset, stages) in tenants {
            let seat = seats.get_mut(usize::from(offset))?;
            if seat.is_some() {
                return None;
            }
            *seat = Some(stages?);
        }
        let count = seats.iter().flatten().count();
        let step_s = if let [Some(a), None, Some(b), None] = seats {
            step_opposite([a, b])
        } else {
            let seated: SmallVec<[Stages; SLOTS]> = seats.iter().flatten().copied().collect();
            // The model covers no other gaps than the one above.
            seats[..seated.len()].iter().all(Option::is_some).then(|| step_in_order(&seated))?
        };
        Some(step_s * self.inflation[count])
    }
}

impl Truth for Interleaved {}

impl Interference for Interleaved {
    /// Jobs whose offsets do not interleave share the GPU's time equally.
    fn speed(&self, state: &State, _: u8, tenants: &[(JobIdx, Knobs)], index: usize) -> Estimate {
        if tenants.len() == 1 {
            return Estimate::certain(1.0);
        }
        let own = state.profile(tenants[index].0).step_s;
        let speed = match self.step_s(state, tenants) {
            Some(step_s) if step_s > 0.0 => own / step_s,
            _ => 1.0 / tenants.len() as f64,
        };
        Estimate::certain(speed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BERT: Stages = [0.5, 160.0, 0.0];
    const DQN: Stages = [446.0, 8.0, 0.0];
    const GPT2: Stages = [0.6, 410.0, 0.0];
    const VGG19: Stages = [114.0, 80.0, 0.0];
    const VGG16: Stages = [117.0, 68.0, 0.0];
    const RESNET18: Stages = [711.0, 110.0, 0.0];

    #[test]
    fn the_worked_examples_of_the_published_model() {
        assert_eq!(step_in_order(&[BERT, DQN]), 454.0);
        assert_eq!(step_in_order(&[DQN, BERT]), 614.0);
        assert_eq!(step_opposite([BERT, DQN]), 454.0);
        assert!((step_in_order(&[GPT2, VGG19]) - 490.6).abs() < 1e-9);
        assert_eq!(step_in_order(&[VGG19, GPT2]), 604.0);
        assert_eq!(step_in_order(&[VGG16, DQN, RESNET18]), 828.0);
        assert_eq!(step_in_order(&[RESNET18, DQN, VGG16]), 829.0);
        assert_eq!(step_in_order(&[DQN, RESNET18, VGG16]), 889.0);
        assert_eq!(step_in_order(&[RESNET18, VGG16, DQN]), 1157.0);
        assert_eq!(step_in_order(&[RESNET18; 3]), 1422.0);
    }

    #[test]
    fn the_best_and_the_worst_offsets_are_found() {
        let best = seat(&[VGG19, GPT2], false);
        assert_eq!((best.offsets.as_slice(), best.step_s), ([0, 2].as_slice(), 490.0));
        assert_eq!(seat(&[VGG16, DQN, RESNET18], false).step_s, 828.0);
        assert_eq!(seat(&[VGG16, DQN, RESNET18], true).step_s, 1157.0);
    }
}
