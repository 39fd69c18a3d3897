//! A journal in words: a line for everything that happened to a job.

use roommate_core::event::{Action, Event};
use roommate_core::idx::{GpuIdx, Idx, JobIdx};
use roommate_core::journal::{JobLine, Observer, StepView, explain};
use roommate_core::time::Time;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EventLine {
    /// Seconds into the run.
    pub at_s: f64,
    /// To which job.
    pub job: String,
    /// What.
    pub what: String,
}

impl std::fmt::Display for EventLine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let at = Time::from_secs(self.at_s).to_string();
        write!(f, "{at:>8}  {}  {}", self.job, self.what)
    }
}

/// Folds a journal into words.
#[derive(Default)]
pub struct EventLog {
    names: Vec<String>,
    /// What was told, oldest first.
    pub lines: VecDeque<EventLine>,
    keep: Option<usize>,
}

impl EventLog {
    /// Keeps only the last so many.
    pub fn last(keep: usize) -> Self {
        Self { keep: Some(keep), ..Self::default() }
    }

    fn tell(&mut self, at: Time, job: JobIdx, what: impl Into<String>) {
        let job = self.names[job.usize()].clone();
        if self.keep.is_some_and(|keep| self.lines.len() >= keep) {
            self.lines.pop_front();
        }
        self.lines.push_back(EventLine { at_s: at.secs(), job, what: what.into() });
    }

    fn fact(&mut self, at: Time, fact: &Event) {
        match fact {
            Event::Submitted(j) => self.tell(at, *j, "submitted"),
            Event::Started(j) => self.tell(at, *j, "runs"),
            Event::Stopped { job, done } => {
                self.tell(at, *job, format!("stands still after {done:.0} steps"));
            }
            Event::Tuned(j) => self.tell(at, *j, "runs with its new settings"),
            Event::Finished(j) => self.tell(at, *j, "finished"),
            Event::Cancelled(j) => self.tell(at, *j, "cancelled"),
            Event::Failed { job, reason: why, done } => {
                self.tell(at, *job, format!("failed: {why}; {done:.0} steps survive"));
            }
            Event::Held { job, .. } | Event::Resized { job, .. } => {
                self.tell(at, *job, explain::set_by_user(fact));
            }
            // Too many to tell, and `ps` shows the last.
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
            let what = note.reason.describe(&|j| names[j.usize()].clone());
            self.tell(step.at, note.job, what);
        }
        for action in step.actions {
            let what = match action {
                Action::Start(_, p) => format!("to start on {}", devices(&p.gpus)),
                Action::Move(_, p) => format!("to move to {}", devices(&p.gpus)),
                Action::Suspend(_) => "to wait in memory".into(),
                Action::Stop(_) => "to leave".into(),
                Action::Tune(_, k) => {
                    format!("to run with {}", serde_json::to_string(k).unwrap_or_default())
                }
                Action::Reject(_, why) => format!("rejected: {why}"),
            };
            self.tell(step.at, action.job(), what);
        }
    }
}

fn devices(gpus: &[GpuIdx]) -> String {
    let numbers: Vec<String> = gpus.iter().map(|g| g.0.to_string()).collect();
    format!("device {}", numbers.join(","))
}
