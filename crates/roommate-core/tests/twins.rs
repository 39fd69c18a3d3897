//! Fast versus obvious: the incremental computations of the core are compared with the definitions,
//! recomputed in full at every step.
#![allow(clippy::unwrap_used, reason = "this is a test")]

#[path = "twins/chronus.rs"]
mod chronus;
#[path = "twins/horus.rs"]
mod horus;
#[path = "twins/las.rs"]
mod las;
#[path = "case/random.rs"]
mod random;
#[path = "twins/room.rs"]
mod room;
#[path = "twins/walk.rs"]
mod walk;

use roommate_core::event::Action;
use roommate_core::journal::{self, Observer, StepView};
use roommate_core::testing::Outcome;
use roommate_core::time::Time;

/// The decisions of a run without the reasons.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Decisions(pub(crate) Vec<(Time, Vec<Action>)>);

impl Observer for Decisions {
    fn step(&mut self, step: &StepView<'_>) {
        if !step.actions.is_empty() {
            self.0.push((step.at, step.actions.to_vec()));
        }
    }
}

/// Folds the journal of a run.
pub(crate) fn fold<O: Observer>(outcome: &Outcome, mut fold: O) -> O {
    journal::read(outcome.journal.as_bytes(), &mut fold).unwrap();
    fold
}

/// Panics with the case and the first decision that differs.
pub(crate) fn assert_same_decisions(fast: &Outcome, slow: &Outcome, case: &str) {
    let (fast, slow) = (fold(fast, Decisions::default()), fold(slow, Decisions::default()));
    if fast != slow {
        let at = fast.0.iter().zip(&slow.0).position(|(a, b)| a != b);
        let at = at.unwrap_or(fast.0.len().min(slow.0.len()));
        panic!("{case}fast: {:?}\nslow: {:?}", fast.0.get(at), slow.0.get(at));
    }
}
