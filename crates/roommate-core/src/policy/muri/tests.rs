//! Charts of Muri.

use crate::number::{Number, Positive};
use crate::testing::{TestCase, picture, picture_with};
use expect_test::expect;

const DATA: &str = ".9/.1/0";
const COMPUTE: &str = ".1/.9/0";

#[test]
fn jobs_of_different_bottlenecks_interleave() {
    // Interleaved, a step takes 1.31 s instead of 2: both end after 5.24 s instead of 8.
    let jobs = format!("a 0 1 4 {DATA}, b 0 1 4 {COMPUTE}");
    expect![[r"
        gpu0  ######
    "]]
    .assert_eq(&picture("muri-l", "1x1", &jobs));
}

#[test]
fn jobs_of_the_same_bottleneck_run_one_after_the_other() {
    let jobs = format!("a 0 1 4 {COMPUTE}, b 0 1 3 {COMPUTE}");
    expect![[r"
        gpu0  bbbaaaa
    "]]
    .assert_eq(&picture("muri-s", "1x1", &jobs));
}

#[test]
fn no_job_shares_while_gpus_are_idle() {
    let jobs = format!("a 0 1 4 {DATA}, b 0 1 4 {COMPUTE}");
    expect![[r"
        gpu0  aaaa
        gpu1  bbbb
    "]]
    .assert_eq(&picture("muri-s", "1x2", &jobs));
}

#[test]
fn the_guard_keeps_short_steps_from_long_ones() {
    // Beside `a` a step of `b` would take several times as long as one after the other.
    let mut case = TestCase::new("muri-s", "1x1", "a 0 1 4 .9/.1/0, b 0 1 20 .1/.9/0");
    case.profiles[2].step_s = Positive::of(0.1);
    case.profiles[2].stages_s = Some([0.01, 0.0, 0.09, 0.0].map(Number::of));
    let outcome = case.run();
    assert!(
        outcome.journal.contains(r#"{"job":0,"why":{"not_worth_sharing":1}}"#),
        "{}",
        outcome.journal
    );
    let guarded = outcome.chart();
    case.params.insert("guard".into(), false.into());
    case.params.insert("autopack".into(), false.into());
    case.params.insert("weight".into(), "efficiency".into());
    let unguarded = case.run().chart();
    expect![[r"
        gpu0  bbaaaa
    "]]
    .assert_eq(&guarded);
    assert!(unguarded.contains('#'), "{unguarded}");
}

#[test]
fn a_group_beyond_the_budget_of_its_node_is_not_formed() {
    // Interleaved, a step takes 1.57 s, of which storage is busy for 1.2 s: 76 %.
    let jobs = "a 0 1 4 .6/.4/0, b 0 1 4 .6/.4/0";
    let shared = |budget: &str| {
        let params = format!(r#"{{"budget": {budget}, "autopack": false, "guard": false}}"#);
        picture_with("muri-l", &params, "1x1", jobs).contains('#')
    };
    assert!(shared("null") && shared("[0.8, 1, 1]") && !shared("[0.7, 1, 1]"));
}

#[test]
fn a_job_without_stage_times_does_not_share() {
    expect![[r"
        gpu0  aabbb
    "]]
    .assert_eq(&picture("muri-s", "1x1", "a 0 1 2, b 0 1 3 .9/.1/0"));
}
