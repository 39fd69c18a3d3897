//! Events of a journal as text: one line for each event of a job.

use roommate_core::event::{Action, Event};
use roommate_core::idx::{GpuIdx, IdxVec, JobIdx};
use roommate_core::journal::{JobLine, Observer, StepView, explain};
use roommate_core::number::Number;
use roommate_core::time::Time;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// An event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EventLine {
    /// Seconds since the state was begun.
    pub at_s: Number,
    /// Name of the job.
    pub job: String,
    /// The event as text.
    pub what: String,
}

impl std::fmt::Display for EventLine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let at = Time::from_secs(self.at_s.get()).to_string();
        write!(f, "{at:>8}  {}  {}", self.job, self.what)
    }
}

/// Folds a journal into lines of text.
#[derive(Default)]
pub struct EventLog {
    names: IdxVec<JobIdx, String>,
    /// The lines, oldest first.
    pub lines: VecDeque<EventLine>,
    keep: Option<usize>,
}

impl EventLog {
    /// Keeps only the last `keep` lines.
    pub fn last(keep: usize) -> Self {
        Self { keep: Some(keep), ..Self::default() }
    }

    fn add(&mut self, at: Time, job: JobIdx, what: impl Into<String>) {
        let job = self.names[job].clone();
        if self.keep.is_some_and(|keep| self.lines.len() >= keep) {
            self.lines.pop_front();
        }
        self.lines.push_back(EventLine { at_s: Number::of(at.secs()), job, what: what.into() });
    }

    fn fact(&mut self, at: Time, fact: &Event) {
        match fact {
            Event::Submitted(j) => self.add(at, *j, "submitted"),
            Event::Started(j) => self.add(at, *j, "runs"),
            Event::Stopped { job, done } => {
                self.add(at, *job, format!("left its devices after {done:.0} steps"));
            }
            Event::Tuned(j) => self.add(at, *j, "runs with its new settings"),
            Event::Finished(j) => self.add(at, *j, "finished"),
            Event::Cancelled(j) => self.add(at, *j, "cancelled"),
            Event::Failed { job, reason: why, done } => {
                self.add(at, *job, format!("failed: {why}; {done:.0} steps survive"));
            }
            Event::Held { job, .. } | Event::Resized { job, .. } => {
                self.add(at, *job, explain::set_by_user(fact));
            }
            // Too frequent to list; `ps` shows the latest.
            Event::Sampled { .. } | Event::Served { .. } => {}
            Event::NodeUp(_) | Event::NodeDown(_) => {}
        }
    }
}

impl Observer for EventLog {
    fn job(&mut self, line: &JobLine) {
        self.names.push(line.name.clone());
    }

    fn step(&mut self, step: &StepView<'_>) {
        for fact in step.facts {
            self.fact(step.at, fact);
        }
        for note in step.notes {
            let names = &self.names;
            let what = note.reason.describe(&|j| names[j].clone());
            self.add(step.at, note.job, what);
        }
        for action in step.actions {
            let what = match action {
                Action::Start(_, p) => format!("to start on {}", devices(&p.gpus)),
                Action::Move(_, p) => format!("to move to {}", devices(&p.gpus)),
                Action::Suspend(_) => "to be suspended".into(),
                Action::Stop(_) => "to be stopped".into(),
                Action::Tune(_, k) => {
                    format!("to run with {}", serde_json::to_string(k).unwrap_or_default())
                }
                Action::Reject(_, why) => format!("rejected: {why}"),
            };
            self.add(step.at, action.job(), what);
        }
    }
}

fn devices(gpus: &[GpuIdx]) -> String {
    let numbers: Vec<String> = gpus.iter().map(|g| g.0.to_string()).collect();
    format!("device {}", numbers.join(","))
}
