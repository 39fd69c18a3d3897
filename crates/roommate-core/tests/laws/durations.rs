//! Whether policies read durations exactly where the registry says so.

use crate::faulty_run::{FaultyRun, play};
use crate::from_registry;
use roommate_core::policy::{Entry, POLICIES, Params};
use serde_json::json;

/// Runs for each policy. A policy that reads durations decides differently within the first few.
const RUNS: u64 = 80;

/// Its own parameters, but rounds that are short beside the jobs of a run.
fn brisk(entry: &Entry) -> Params {
    let own = entry.params(&Params::new()).unwrap();
    let rounds = ["round_s", "reset_s"].into_iter().filter(|name| own.get(name).is_some());
    rounds.map(|name| (name.to_owned(), json!(3.0))).collect()
}

/// Whether the policy decides otherwise when no job says how long it takes.
fn reads_durations(entry: &Entry, seed: u64) -> bool {
    let mut run = FaultyRun::random(seed, entry);
    run.case.params = brisk(entry);
    let decide = |run: &FaultyRun| play(run, from_registry(run), false).unwrap().actions;
    let declared = decide(&run);
    for job in &mut run.case.jobs {
        (job.spec.work, job.spec.declared_s) = (None, None);
    }
    decide(&run) != declared
}

#[test]
fn only_policies_that_say_so_read_durations() {
    for entry in POLICIES {
        let reads = (0..RUNS).any(|seed| reads_durations(entry, seed));
        assert_eq!(reads, entry.knows_durations, "{}", entry.name);
    }
}
