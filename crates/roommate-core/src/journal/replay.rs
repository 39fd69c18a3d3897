//! Replay: runs the facts of a journal through a new engine and checks that it decides the same.

use crate::engine::Engine;
use crate::journal::{Head, JobLine, Observer, ProfileLine, StepView};
use crate::policy::PolicyError;
use crate::time::Time;

/// The first step at which a replay decided differently.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Number of the step, from 1.
    pub step: u64,
    /// Time of the step.
    pub at: Time,
    /// The decision in the journal.
    pub recorded: String,
    /// The decision of the replay.
    pub replayed: String,
}

/// Folds a journal by deciding everything again. What it comes to is the proof that nothing
/// differs, and the engine, with which a world can go on from the last line.
#[derive(Default)]
pub struct Replay {
    /// The engine as it is after the last step that was compared; none if the policy was refused.
    pub engine: Option<Engine>,
    /// The time of the last step.
    pub at: Time,
    /// When to call the engine again at the latest, if nothing happens before.
    pub wake: Option<Time>,
    /// Steps compared.
    pub steps: u64,
    /// Actions compared.
    pub actions: u64,
    /// The first difference, if any.
    pub difference: Option<Difference>,
    /// Why the policy of the journal could not be built.
    pub refused: Option<PolicyError>,
}

impl Observer for Replay {
    fn head(&mut self, head: &Head) {
        match head.engine() {
            Ok(engine) => self.engine = Some(engine),
            Err(e) => self.refused = Some(e),
        }
    }

    fn profile(&mut self, line: &ProfileLine) {
        if let Some(engine) = &mut self.engine {
            engine.add_profile(line.profile.clone());
        }
    }

    fn job(&mut self, line: &JobLine) {
        if let Some(engine) = &mut self.engine {
            match &line.on {
                Some(on) => engine.add_found_job(line.spec.clone(), on.clone()),
                None => engine.add_job(line.spec.clone()),
            };
        }
    }

    fn step(&mut self, step: &StepView<'_>) {
        let Some(engine) = self.engine.as_mut().filter(|_| self.difference.is_none()) else {
            return;
        };
        self.steps += 1;
        self.actions += step.actions.len() as u64;
        let again = engine.step(step.at, step.facts);
        (self.at, self.wake) = (step.at, again.wake);
        if again.actions != step.actions || again.notes != step.notes || again.asked != step.asked {
            let text = |view: &StepView<'_>| {
                serde_json::to_string(view).expect("a step can always be written")
            };
            self.difference = Some(Difference {
                step: self.steps,
                at: step.at,
                recorded: text(step),
                replayed: text(&StepView {
                    by: step.by,
                    ..StepView::of(step.at, step.facts, &again)
                }),
            });
        }
    }
}
