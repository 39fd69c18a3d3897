//! An ablation never issues the action that it ablates. The canary is the policy that has the part:
//! played in the same cases it must be caught.

use crate::random::{self, CaseOptions};
use roommate_core::event::{Action, Placement};
use roommate_core::idx::{GpuSet, JobIdx};
use roommate_core::interference::stages;
use roommate_core::job::Job;
use roommate_core::journal::{self, Observer, StepView};
use roommate_core::knobs::Knobs;
use roommate_core::performance::sensitivity::{Host, demand, share};
use roommate_core::policy::{Ablation, Entry, POLICIES, Part, find};
use roommate_core::reason::{Note, Reason, Source};
use roommate_core::state::State;
use roommate_core::testing::TestCase;
use std::collections::BTreeMap;

/// Cases for each ablation.
const CASES: u64 = 300;

/// Finds uses of a part in a journal.
struct Scan<'a> {
    part: Part,
    case: &'a TestCase,
    /// Specs and profiles of the case, before anything happened.
    state: State,
    found: Option<String>,
    /// Whether a step with actions went by.
    acted: bool,
}

impl Observer for Scan<'_> {
    fn step(&mut self, step: &StepView<'_>) {
        let note = step.notes.iter().find(|n| self.is_said(n)).map(|n| format!("{n:?}"));
        let action = step.actions.iter().find(|a| self.is_done(a)).map(|a| format!("{a:?}"));
        // Later groups lost members or had to stay where they were.
        let first = !self.acted && !step.actions.is_empty();
        let group = if first { self.group(step.actions) } else { None };
        self.acted |= first;
        self.found = self.found.take().or(note).or(action).or(group);
    }
}

impl Scan<'_> {
    fn is_said(&self, note: &Note) -> bool {
        use Reason::{AtShare, BatchNotApplied, BatchSettled, Beside, BetterToWait, NoiseDrifted};
        match (self.part, note.reason) {
            (Part::BatchTuning, reason) => {
                matches!(reason, BatchSettled { .. } | BatchNotApplied { .. } | NoiseDrifted { .. })
            }
            (Part::Prediction, BetterToWait { .. }) => true,
            (Part::Prediction, Beside { source, .. }) => source != Source::Thumb,
            (Part::BelowDemand, reason) => matches!(reason, AtShare(_)),
            _ => false,
        }
    }

    fn is_done(&self, action: &Action) -> bool {
        let (Action::Start(job, Placement { knobs, .. })
        | Action::Move(job, Placement { knobs, .. })
        | Action::Tune(job, knobs)) = action
        else {
            return false;
        };
        let host = Host::of(*knobs);
        match self.part {
            Part::BatchTuning => knobs.batch != self.state.spec(*job).knobs.batch,
            Part::AboveShare => !host.within(share(&self.state, *job)),
            Part::BelowDemand => !demand(&self.state, *job).within(host),
            Part::Prediction | Part::Matching | Part::StageOrder => false,
        }
    }

    /// The first group of these starts that shows the part.
    fn group(&self, actions: &[Action]) -> Option<String> {
        let mut groups: BTreeMap<&GpuSet, Vec<(JobIdx, Knobs)>> = BTreeMap::new();
        for action in actions {
            if let Action::Start(job, place) = action {
                groups.entry(&place.gpus).or_default().push((*job, place.knobs));
            }
        }
        let shows = |group: &&Vec<(JobIdx, Knobs)>| match self.part {
            Part::Matching => self.is_matched(group),
            Part::StageOrder => self.is_well_seated(group) == Some(true),
            _ => false,
        };
        groups.values().find(shows).map(|group| format!("{group:?}"))
    }

    /// Whether others of the same width stand between the members: by place in the line they would
    /// not be in one group.
    fn is_matched(&self, group: &[(JobIdx, Knobs)]) -> bool {
        let width = |j: JobIdx| self.state.spec(j).gpus;
        let rank = |j: JobIdx| (0..j.0).filter(|k| width(JobIdx(*k)) == width(j)).count();
        let ranks = || group.iter().map(|(j, _)| rank(*j));
        let packing = self.case.params["packing"].as_u64().unwrap() as usize;
        ranks().max().unwrap() - ranks().min().unwrap() >= packing
    }

    /// Whether another order of the members would have a longer step; nothing where stages are not
    /// known or the order cannot matter.
    fn is_well_seated(&self, group: &[(JobIdx, Knobs)]) -> Option<bool> {
        let members: Vec<_> =
            group.iter().map(|(j, _)| stages::of(&self.state, *j)).collect::<Option<_>>()?;
        if members.len() < 2 {
            return None;
        }
        let here_s = stages::Interleaved { inflation: [1.0; 5] }.step_s(&self.state, group)?;
        Some(here_s < stages::seat(&members, true).step_s - 1e-9)
    }
}

/// The case of a seed, with the parameters that make the entry what it is. Every other case has all
/// its jobs at once, so that groups are formed of many.
fn case(seed: u64, entry: &Entry) -> TestCase {
    let options = CaseOptions { limits: entry.name.starts_with("synergy"), ..CaseOptions::WILD };
    let mut case = random::case(seed, entry, options);
    let preset = entry.preset();
    case.params.retain(|name, _| !preset.contains_key(name));
    if seed.is_multiple_of(2) {
        case.jobs.iter_mut().for_each(|job| job.submit = 0);
    }
    case
}

/// What a policy does of a part that it should not have.
fn misdeed(case: &TestCase, part: Part, player: &Entry) -> Option<String> {
    let policy = player.build(&case.params).unwrap();
    let outcome = case.run_policy(policy, &mut |_| {});
    let mut state = State::new(&case.cluster, case.costs);
    state.profiles = case.profiles.iter().cloned().collect();
    for job in &case.jobs {
        state.specs.push(job.spec.clone());
        state.jobs.push(Job::expected());
    }
    let mut scan = Scan { part, case, state, found: None, acted: false };
    journal::read(outcome.journal.as_bytes(), &mut scan).unwrap();
    scan.found
}

fn ablations() -> impl Iterator<Item = (&'static Entry, Ablation)> {
    POLICIES.iter().filter_map(|entry| Some((entry, entry.ablation()?)))
}

#[test]
fn an_ablation_never_does_what_it_ablates() {
    for (entry, ablation) in ablations() {
        for seed in 0..CASES {
            let case = case(seed, entry);
            if let Some(done) = misdeed(&case, ablation.lacks, entry) {
                panic!("{:?}: {done}\n{}", ablation.lacks, random::compact(&case));
            }
        }
    }
}

#[test]
fn a_policy_with_the_part_is_caught() {
    for (entry, ablation) in ablations() {
        let whole = find(ablation.of).unwrap();
        let caught = |seed: &u64| misdeed(&case(*seed, entry), ablation.lacks, whole).is_some();
        let caught = (0..CASES).filter(caught).count();
        assert!(caught > 2, "{} passed for {} {caught} times", whole.name, entry.name);
    }
}
