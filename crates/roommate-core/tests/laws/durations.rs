//! What the registry says of who knows how long jobs take, against what policies do.

use crate::drama::{Drama, play};
use crate::from_registry;
use roommate_core::policy::{Entry, POLICIES, Params};
use serde_json::json;

/// Dramas for each policy. Those that read durations betray it within the first few.
const DRAMAS: u64 = 150;

/// Its own parameters, but rounds that are short beside the jobs of a drama.
fn brisk(entry: &Entry) -> Params {
    let own = entry.params(&Params::new()).unwrap();
    let rounds = ["round_s", "reset_s"].into_iter().filter(|name| own.get(name).is_some());
    rounds.map(|name| (name.to_owned(), json!(3.0))).collect()
}

/// Whether the policy decides otherwise when no job says how long it takes.
fn reads_durations(entry: &Entry, seed: u64) -> bool {
    let mut drama = Drama::random(seed, entry);
    drama.scene.params = brisk(entry);
    let decide = |drama: &Drama| play(drama, from_registry(drama), false).unwrap().actions;
    let told = decide(&drama);
    for actor in &mut drama.scene.actors {
        (actor.spec.work, actor.spec.declared_s) = (None, None);
    }
    decide(&drama) != told
}

#[test]
fn only_those_that_say_so_read_durations() {
    for entry in POLICIES {
        let reads = (0..DRAMAS).any(|seed| reads_durations(entry, seed));
        assert_eq!(reads, entry.knows_durations, "{}", entry.name);
    }
}
