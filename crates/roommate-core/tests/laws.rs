//! Laws that hold for every policy in the registry, over random cases from a seed; and policies
//! that break one law each, to prove that the checks can fail.
//!
//! A failure prints the smallest case that still fails, with its seed and its faults.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "this is a test")]

#[path = "laws/ablations.rs"]
mod ablations;
#[path = "laws/books.rs"]
mod books;
#[path = "laws/canary.rs"]
mod canary;
#[path = "laws/durations.rs"]
mod durations;
#[path = "laws/faulty_run.rs"]
mod faulty_run;
#[path = "laws/fuzz.rs"]
mod fuzz;
#[path = "laws/price.rs"]
mod price;
#[path = "case/random.rs"]
mod random;
#[path = "laws/sharing.rs"]
mod sharing;
#[path = "laws/undo.rs"]
mod undo;

use faulty_run::{Broken, FaultyRun, Law, RunOutcome, play};
use roommate_core::event::{Action, Event};
use roommate_core::idx::{Idx, IdxVec, JobIdx};
use roommate_core::job::Class;
use roommate_core::journal::metrics::Fold;
use roommate_core::journal::replay::Replay;
use roommate_core::journal::{self, JobLine, Observer, StepView};
use roommate_core::placement::Rule;
use roommate_core::policy::{POLICIES, Policy};
use roommate_core::reason::Reason;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Makes the policy under test; once for every run of it.
pub(crate) type Build<'a> = &'a dyn Fn(&FaultyRun) -> Box<dyn Policy>;

fn from_registry(faulty_run: &FaultyRun) -> Box<dyn Policy> {
    let entry = roommate_core::policy::find(&faulty_run.case.policy).unwrap();
    entry.build(&faulty_run.case.params).unwrap_or_else(|e| panic!("{e}"))
}

/// All laws for one faulty run.
fn check(faulty_run: &FaultyRun, build: Build<'_>) -> Result<(), Broken> {
    let run = |look| {
        catch_unwind(AssertUnwindSafe(|| play(faulty_run, build(faulty_run), look)))
            .unwrap_or_else(|_| Err(Broken(Law::NeverPanics, "see above".into())))
    };
    let outcome = run(false)?;
    no_feasible_job_is_lost(faulty_run, &outcome)?;
    let again = run(false)?;
    Broken::unless(again.journal == outcome.journal, Law::SameSeedSameJournal, || {
        first_difference(&outcome.journal, &again.journal)
    })?;
    let looked = run(true)?;
    // A second call must not show later either: the same decisions follow.
    Broken::unless(looked.actions == outcome.actions, Law::SecondLook, || {
        first_difference(&format!("{:#?}", outcome.actions), &format!("{:#?}", looked.actions))
    })?;
    let mut folds = (Fold::default(), Replay::default());
    let read = journal::read(outcome.journal.as_bytes(), &mut folds);
    Broken::unless(read.is_ok(), Law::RoundTrip, || format!("{read:?}"))?;
    let (fold, replay) = folds;
    Broken::unless(fold.metrics() == outcome.metrics, Law::RoundTrip, || {
        format!("{:?}\nread back: {:?}", outcome.metrics, fold.metrics())
    })?;
    let same = replay.difference.is_none() && replay.refused.is_none();
    Broken::unless(same, Law::Replay, || format!("{:?} {:?}", replay.difference, replay.refused))?;
    let compared = outcome.actions.iter().map(|(_, a)| a.len() as u64).sum::<u64>();
    Broken::unless(replay.actions == compared, Law::Replay, || "the replay skipped a step".into())
}

/// The run ends only when every job has; what remains is that no feasible job was dropped without a
/// reason.
fn no_feasible_job_is_lost(faulty_run: &FaultyRun, outcome: &RunOutcome) -> Result<(), Broken> {
    struct Ends(IdxVec<JobIdx, Option<&'static str>>);
    impl Observer for Ends {
        fn job(&mut self, _: &JobLine) {
            self.0.push(None);
        }
        fn step(&mut self, step: &StepView<'_>) {
            for fact in step.facts {
                match fact {
                    Event::Finished(j) => self.0[*j] = Some("finished"),
                    Event::Cancelled(j) => self.0[*j] = Some("cancelled"),
                    _ => {}
                }
            }
            for note in step.notes.iter().filter(|n| n.reason == Reason::OutOfRetries) {
                self.0[note.job] = Some("failed");
            }
            for action in step.actions {
                if let Action::Reject(j, _) = action {
                    self.0[*j] = Some("rejected");
                }
            }
        }
    }
    let mut ends = Ends(IdxVec::new());
    journal::read(outcome.journal.as_bytes(), &mut ends)
        .map_err(|e| Broken(Law::RoundTrip, e.to_string()))?;
    for (i, job) in faulty_run.case.jobs.iter().enumerate() {
        let idx = JobIdx::from_usize(i);
        let feasible = random::fits_an_empty_cluster(&faulty_run.case, &job.spec, Rule::Count);
        let end = ends.0[idx];
        let fine = match end {
            Some("rejected") => !feasible,
            Some(how) => feasible || how == "cancelled",
            None => false,
        };
        Broken::unless(fine, Law::EveryFeasibleJobFinishes, || {
            format!("{idx}: {end:?}, feasible {feasible}")
        })?;
    }
    Ok(())
}

fn first_difference(a: &str, b: &str) -> String {
    let lines = a.lines().zip(b.lines()).enumerate();
    let differing =
        lines.filter(|(_, (x, y))| x != y).map(|(i, (x, y))| format!("{i}: {x}\n{i}: {y}"));
    differing.take(3).collect::<Vec<_>>().join("\n")
}

/// Drops jobs and mishaps as long as the same law stays broken.
fn shrink(mut faulty_run: FaultyRun, mut broken: Broken, build: Build<'_>) -> (FaultyRun, Broken) {
    loop {
        let smaller = (0..faulty_run.case.jobs.len() + faulty_run.mishaps.len()).find_map(|i| {
            let mut less = FaultyRun::random(faulty_run.case.seed, entry_of(&faulty_run));
            less.case.jobs.clone_from(&faulty_run.case.jobs);
            less.mishaps.clone_from(&faulty_run.mishaps);
            if i < faulty_run.mishaps.len() {
                // A node that never comes back, or a service that is never ended, would be a reason
                // of its own to wait for ever.
                let serves = |j: JobIdx| faulty_run.case.job(j).spec.class == Class::Service;
                match faulty_run.mishaps[i].1 {
                    faulty_run::Mishap::Up(_) => return None,
                    faulty_run::Mishap::Cancel(job) if serves(job) => return None,
                    _ => {}
                }
                less.mishaps.remove(i);
            } else {
                less.without_actor(i - faulty_run.mishaps.len());
            }
            let found = if less.case.jobs.is_empty() { Ok(()) } else { check(&less, build) };
            found.err().filter(|b| b.0 == broken.0).map(|b| (less, b))
        });
        match smaller {
            Some(found) => (faulty_run, broken) = found,
            None => return (faulty_run, broken),
        }
    }
}

fn entry_of(faulty_run: &FaultyRun) -> &'static roommate_core::policy::Entry {
    roommate_core::policy::find(&faulty_run.case.policy).unwrap()
}

/// Faulty runs per policy.
const RUNS_PER_POLICY: u64 = 1_600;

#[test]
fn every_policy_keeps_every_law() {
    let mut cases = 0;
    for entry in POLICIES {
        for seed in 0..RUNS_PER_POLICY {
            let faulty_run = FaultyRun::random(seed, entry);
            if let Err(broken) = check(&faulty_run, &from_registry) {
                let (faulty_run, broken) = shrink(faulty_run, broken, &from_registry);
                panic!("{faulty_run}{:?}: {}", broken.0, broken.1);
            }
            cases += 1;
        }
    }
    eprintln!("{cases} random runs kept all laws");
    assert!(cases >= 10_000, "only {cases} cases were tried");
}
