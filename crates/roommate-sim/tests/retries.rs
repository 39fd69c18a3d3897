//! Retries after a failure depend on the class of the failure, under any policy.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use expect_test::expect;
use roommate_core::idx::ProfileIdx;
use roommate_core::interference::Undisturbed;
use roommate_core::job::{Retries, Spec};
use roommate_core::journal::gantt::Gantt;
use roommate_core::journal::metrics::{Fold, Metrics};
use roommate_core::policy::{self, Params};
use roommate_core::profile::Profile;
use roommate_core::state::Costs;
use roommate_core::time::{Span, Time};
use roommate_sim::fault::Faults;
use roommate_sim::serving::Measuring;
use roommate_sim::world::{Arrival, Setup, simulate};

/// Six jobs of ten seconds in sequence on one GPU, half of which would fail. There are no
/// checkpoints, so every attempt starts from the beginning.
fn run(policy: &str, user_errors: f64, retries: Retries) -> (String, Metrics) {
    let entry = policy::find(policy).unwrap();
    let setup = Setup {
        cluster: "1x1".parse().unwrap(),
        costs: Costs { restart: Span::ZERO, backoff: Span::ZERO, ..Costs::default() },
        policy_name: policy.into(),
        params: Params::new(),
        policy: entry.build(&Params::new()).unwrap(),
        known_pairs: None,
        truth: Box::new(Undisturbed),
        faults: Faults {
            crash: 0.5,
            user_errors,
            checkpoint: Span::from_secs(1e6),
            ..Faults::default()
        },
        seed: 1,
        profiles: vec![("work".into(), Profile::of_step(1.0))],
        measure: None,
        measuring: Measuring::default(),
        blind: None,
        teams: vec!["all".into()],
    };
    let job = |name: char| Arrival {
        at: Time::ZERO,
        name: name.to_string(),
        spec: Spec { retries, ..Spec::training(1, 10.0, ProfileIdx(0)) },
        work: 10.0,
        requests: None,
    };
    let mut folds = (Fold::default(), Gantt::default());
    simulate(setup, "abcdef".chars().map(job), &mut folds, &mut |_| {}).unwrap();
    (folds.1.chart(90, 4), folds.0.metrics())
}

const CAREFUL: Retries = Retries { user: 0, infra: 3, unknown: 3 };

#[test]
fn a_user_error_is_not_retried() {
    let (blind, blind_metrics) = run("fifo", 1.0, 3.into());
    let (careful, careful_metrics) = run("fifo", 1.0, CAREFUL);
    expect![[r#"
        gpu0  aaaaaaabbbbbbbbbbbbbbbcccccccdddeeeeeeeeeefffffffffffff
    "#]]
    .assert_eq(&blind);
    expect![[r#"
        gpu0  aabbbbcdeeeeeeeeeeffff
    "#]]
    .assert_eq(&careful);
    // The same jobs finish, and each of the others is spared three retries.
    assert_eq!(blind_metrics.finished, careful_metrics.finished);
    assert_eq!(blind_metrics.failures, 4 * careful_metrics.failures);
}

#[test]
fn other_failures_are_retried() {
    let (_, careful) = run("fifo", 0.0, CAREFUL);
    let (_, never) = run("fifo", 0.0, 0.into());
    assert!(careful.finished > never.finished && careful.failures > 0, "{careful:?}");
}

#[test]
fn the_same_jobs_have_user_errors_under_every_policy() {
    let wrong = |policy: &str| run(policy, 1.0, 0.into()).1.finished;
    for policy in ["sjf", "srtf", "tiresias", "fifo-backfill"] {
        assert_eq!(wrong(policy), wrong("fifo"), "{policy}");
    }
}
