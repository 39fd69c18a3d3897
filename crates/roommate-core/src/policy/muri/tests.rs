//! Pictures of Muri.

use crate::testing::{TestCase, picture, picture_with};
use expect_test::expect;

const DATA: &str = ".9/.1/0";
const COMPUTE: &str = ".1/.9/0";

#[test]
fn jobs_that_need_different_resources_share() {
    // Together a step takes 1.31 s instead of 2: both end after 5.24 s, one by one after 8.
    let jobs = format!("a 0 1 4 {DATA}, b 0 1 4 {COMPUTE}");
    expect![[r"
        gpu0  ######
    "]]
    .assert_eq(&picture("muri-l", "1x1", &jobs));
}

#[test]
fn jobs_that_need_the_same_take_turns() {
    let jobs = format!("a 0 1 4 {COMPUTE}, b 0 1 3 {COMPUTE}");
    expect![[r"
        gpu0  bbbaaaa
    "]]
    .assert_eq(&picture("muri-s", "1x1", &jobs));
}

#[test]
fn nobody_shares_while_there_is_room() {
    let jobs = format!("a 0 1 4 {DATA}, b 0 1 4 {COMPUTE}");
    expect![[r"
        gpu0  aaaa
        gpu1  bbbb
    "]]
    .assert_eq(&picture("muri-s", "1x2", &jobs));
}

#[test]
fn a_short_job_is_guarded_from_a_slow_partner() {
    // Beside `a` a step of `b` would take several times as long as taking turns.
    let mut case = TestCase::new("muri-s", "1x1", "a 0 1 4 .9/.1/0, b 0 1 20 .1/.9/0");
    case.profiles[2].step_s = 0.1;
    case.profiles[2].stages_s = Some([0.01, 0.0, 0.09, 0.0]);
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
fn a_group_that_asks_too_much_of_its_node_is_not_formed() {
    // Together a step takes 1.57 s, and 1.2 s of it they read: 76 % of the time.
    let jobs = "a 0 1 4 .6/.4/0, b 0 1 4 .6/.4/0";
    let shared = |budget: &str| {
        let params = format!(r#"{{"budget": {budget}, "autopack": false, "guard": false}}"#);
        picture_with("muri-l", &params, "1x1", jobs).contains('#')
    };
    assert!(shared("null") && shared("[0.8, 1, 1]") && !shared("[0.7, 1, 1]"));
}

#[test]
fn a_job_without_stage_times_is_left_alone() {
    expect![[r"
        gpu0  aabbb
    "]]
    .assert_eq(&picture("muri-s", "1x1", "a 0 1 2, b 0 1 3 .9/.1/0"));
}
