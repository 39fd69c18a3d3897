//! A world in which starting and stopping take no time and every step takes its solo time.

use roommate_core::event::{Action, Event};
use roommate_core::idx::JobIdx;
use roommate_core::job::Spec;
use roommate_core::journal::{Head, JobLine, Observer, ProfileLine, StepView, Writer};
use roommate_core::policy::PolicyError;
use roommate_core::profile::Profile;
use roommate_core::time::{Span, Time};
use std::collections::BTreeSet;

/// Runs jobs that all arrive at the beginning; returns the journal.
///
/// # Errors
/// The policy of the head does not exist or refuses its parameters.
///
/// # Panics
/// Never: memory can always be written to.
pub fn run(head: &Head, profile: &Profile, specs: &[Spec]) -> Result<Vec<u8>, PolicyError> {
    let mut engine = head.engine()?;
    let mut journal = Writer::new(Vec::new());
    journal.head(head);
    let idx = engine.add_profile(profile.clone());
    journal.profile(&ProfileLine { idx, name: "step".into(), profile: profile.clone() });
    let mut facts: Vec<Event> = Vec::new();
    for (n, spec) in specs.iter().enumerate() {
        let job = engine.add_job(spec.clone());
        journal.job(&JobLine { idx: job, name: format!("job-{n}"), spec: spec.clone() });
        facts.push(Event::Submitted(job));
    }
    let mut ends: BTreeSet<(Time, JobIdx)> = BTreeSet::new();
    let mut now = Time::ZERO;
    loop {
        let step = engine.step(now, &facts);
        journal.step(&StepView::of(now, &facts, &step));
        let (actions, wake) = (step.actions.to_vec(), step.wake);
        facts.clear();
        for action in actions {
            match action {
                Action::Start(job, _) => {
                    let state = engine.state();
                    let left = state.spec(job).work.unwrap_or(0.0) - state.done(job);
                    ends.insert((now + Span::from_secs(left * profile.step_s), job));
                    facts.push(Event::Started(job));
                }
                Action::Stop(job) => {
                    ends.retain(|(_, j)| *j != job);
                    facts.push(Event::Stopped { job, done: engine.state().done(job) });
                }
                Action::Tune(job, _) => facts.push(Event::Tuned(job)),
                _ => {}
            }
        }
        if !facts.is_empty() {
            continue;
        }
        let next = ends.first().map(|(at, _)| *at).into_iter().chain(wake).min();
        let Some(next) = next.filter(|_| !ends.is_empty()) else { break };
        now = next;
        while let Some((at, job)) = ends.first().copied().filter(|(at, _)| *at <= now) {
            ends.remove(&(at, job));
            facts.push(Event::Finished(job));
        }
    }
    journal.end(now);
    Ok(journal.finish().expect("memory can always be written to"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use roommate_core::idx::ProfileIdx;
    use roommate_core::journal::{self, replay::Replay};
    use roommate_core::state::Costs;

    #[test]
    fn a_journal_of_this_world_replays() {
        let cluster = "1x2".parse().expect("a cluster");
        let head =
            Head::new("instant", ("fifo", serde_json::Map::new()), cluster, Costs::default(), 1);
        let specs = [2, 1, 1].map(|gpus| Spec::training(gpus, 10.0, ProfileIdx(0)));
        let lines = run(&head, &Profile::of_step(1.0), &specs).expect("fifo exists");
        let mut replay = Replay::default();
        journal::read(&lines[..], &mut replay).expect("a journal");
        assert!(replay.difference.is_none() && replay.refused.is_none());
        assert_eq!(replay.engine.expect("an engine").state().now, Time::from_secs(20.0));
    }
}
