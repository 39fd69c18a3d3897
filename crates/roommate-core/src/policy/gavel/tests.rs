use crate::idx::ProfileIdx;
use crate::interference::table::Table;
use crate::number::Positive;
use crate::testing::{TestCase, picture_with};
use expect_test::expect;
use std::collections::BTreeMap;
use std::sync::Arc;

const ROUNDS: &str = r#"{"round_s": 2, "reset_s": 0}"#;

#[test]
fn equal_jobs_take_turns() {
    expect![[r#"
        gpu0  aabbaabbaabbaabb
    "#]]
    .assert_eq(&picture_with("gavel", ROUNDS, "1x1", "a 0 1 8, b 0 1 8"));
}

#[test]
fn jobs_that_run_on_keep_their_gpus() {
    expect![[r#"
        gpu0  aaccccbbbbbb
        gpu1  .bbbaaaaaaa
    "#]]
    .assert_eq(&picture_with("gavel", ROUNDS, "1x2", "a 0 1 9, b 1 1 9, c 2 1 4"));
}

#[test]
fn a_gang_gets_less_of_the_time_than_single_jobs() {
    expect![[r#"
        gpu0  bbaabbbbaabbaaaa
        gpu1  ccaaccccaaccaaaa
    "#]]
    .assert_eq(&picture_with("gavel", ROUNDS, "1x2", "a 0 2 8, b 0 1 8, c 0 1 8"));
}

/// Two GPU models; the first job gains much from the faster one, the second nothing.
fn two_models(policy: &str, params: &str) -> TestCase {
    let mut case = TestCase::new(policy, "1x1:v100,1x1:k80", "a 0 1 12, b 0 1 12");
    case.params = serde_json::from_str(params).unwrap();
    case.profiles.push(case.profiles[0].clone());
    let speeds = |on_k80| [(0, Positive::of(1.0)), (1, Positive::of(on_k80))].into();
    case.profiles[0].model_speed = speeds(0.25);
    case.profiles[1].model_speed = speeds(1.0);
    case.jobs[1].spec.profile = ProfileIdx(1);
    case
}

#[test]
fn the_fast_gpu_goes_to_the_job_that_gains_most() {
    let throughput = r#"{"objective": "throughput", "round_s": 2, "reset_s": 0}"#;
    expect![[r#"
        gpu0  aaaaaaaaaaaa
        gpu1  bbbbbbbbbbbb
    "#]]
    .assert_eq(&two_models("gavel", throughput).run().chart());
    expect![[r#"
        gpu0  aaaaaaaaaaaa
        gpu1  bbbbbbbbbbbb
    "#]]
    .assert_eq(&two_models("gavel-makespan", ROUNDS).run().chart());
}

#[test]
fn fifo_takes_the_fastest_free_gpu_model() {
    expect![[r#"
        gpu0  aaaaaaaaaaaa
        gpu1  bbbbbbbbbbbb
    "#]]
    .assert_eq(&two_models("gavel-fifo", ROUNDS).run().chart());
}

#[test]
fn jobs_that_are_known_to_gain_share() {
    let speeds = |speed: f64| {
        let pairs = BTreeMap::from([((ProfileIdx(0), ProfileIdx(0)), [speed; 2])]);
        Table::new(pairs, 0.5)
    };
    let mut case = TestCase::new("gavel-packed", "1x1", "a 0 1 6, b 0 1 6");
    case.params = serde_json::from_str(ROUNDS).unwrap();
    case.truth = Arc::new(speeds(0.8));
    expect![[r#"
        gpu0  aabbaabbaabb
    "#]]
    .assert_eq(&case.run().chart());
    case.known_pairs = Some(speeds(0.8));
    expect![[r#"
        gpu0  ########
    "#]]
    .assert_eq(&case.run().chart());
    case.known_pairs = Some(speeds(0.4));
    let apart = case.run().chart();
    assert!(!apart.contains('#'), "{apart}");
}

#[test]
fn a_guessed_speed_is_noted() {
    let mut case = two_models("gavel", ROUNDS);
    case.profiles[0].model_speed.clear();
    let journal = case.run().journal;
    assert!(journal.contains("speed_guessed"), "{journal}");
}

#[test]
fn allox_runs_short_jobs_first_and_preempts_none() {
    expect![[r#"
        gpu0  bbcccaaaaaaa
    "#]]
    .assert_eq(&picture_with("gavel-allox", ROUNDS, "1x1", "a 0 1 7, b 0 1 2, c 1 1 3"));
}

#[test]
fn couples_share_while_they_gain() {
    let speeds = |speed: f64| {
        let pairs = BTreeMap::from([((ProfileIdx(0), ProfileIdx(0)), [speed; 2])]);
        Table::new(pairs, 0.5)
    };
    let mut case = TestCase::new("gavel-couples", "1x1", "a 0 1 6, b 0 1 6");
    case.params = serde_json::from_str(ROUNDS).unwrap();
    case.truth = Arc::new(speeds(0.8));
    case.known_pairs = Some(speeds(0.8));
    let together = case.run().chart();
    assert!(together.contains('#') && !together.contains('a'), "{together}");
    case.known_pairs = Some(speeds(0.4));
    let apart = case.run().chart();
    assert!(!apart.contains('#'), "{apart}");
}

#[test]
fn packed_fifo_lets_a_waiting_job_share() {
    let pairs = BTreeMap::from([((ProfileIdx(0), ProfileIdx(0)), [0.8; 2])]);
    let mut case = TestCase::new("gavel-fifo", "1x1", "a 0 1 6, b 0 1 6, c 0 1 4");
    case.params = serde_json::from_str(r#"{"round_s": 2, "reset_s": 0, "packed": true}"#).unwrap();
    case.truth = Arc::new(Table::new(pairs.clone(), 0.5));
    case.known_pairs = Some(Table::new(pairs, 0.5));
    expect![[r#"
        gpu0  ########cccc
    "#]]
    .assert_eq(&case.run().chart());
}
