//! Charts of Chronus and what happens to promises.

use crate::engine::Engine;
use crate::event::{Action, Event};
use crate::idx::NodeIdx;
use crate::interference::Undisturbed;
use crate::job::{Class, Spec};
use crate::number::Number;
use crate::profile::Profile;
use crate::reason::Reason;
use crate::state::Costs;
use crate::testing::{Outcome, TestCase};
use crate::time::{Span, Time};
use expect_test::expect;

/// A case in which these jobs have deadlines (index, seconds) and the others are best effort.
fn case(params: &str, cluster: &str, jobs: &str, deadlines: &[(usize, u64)]) -> TestCase {
    let mut case = TestCase::new("chronus", cluster, jobs);
    case.params = serde_json::from_str(params).unwrap();
    case.jobs.iter_mut().for_each(|a| a.spec.class = Class::BestEffort);
    for (i, due) in deadlines {
        let spec: &mut Spec = &mut case.jobs[*i].spec;
        spec.class = Class::Guaranteed;
        spec.deadline = Some(Time::from_secs(*due as f64));
    }
    case
}

/// Leases and slots of one tick and exact estimates, with these parameters added.
fn unit(more: &str) -> String {
    format!(r#"{{"lease_s": 1, "slot_s": 1, "safety": 1.0{more}}}"#)
}

fn run(params: &str, cluster: &str, jobs: &str, deadlines: &[(usize, u64)]) -> Outcome {
    case(params, cluster, jobs, deadlines).run()
}

#[test]
fn the_sign_decides_which_job_runs_first() {
    let chart = |sign| {
        let params = unit(&format!(r#", "sign": "{sign}""#));
        run(&params, "1x2", "s 0 2 2, b 0 1 2", &[(0, 4)]).chart()
    };
    expect![[r#"
        gpu0  aabb
        gpu1  aa
    "#]]
    .assert_eq(&chart("plus"));
    expect![[r#"
        gpu0  bbaa
        gpu1  ..aa
    "#]]
    .assert_eq(&chart("minus"));
}

#[test]
fn the_latest_leases_leave_room_for_tighter_deadlines() {
    let outcome = run(&unit(""), "1x1", "1 0 1 2, 2 0 1 1, 3 0 1 1", &[(0, 3), (1, 2), (2, 3)]);
    expect![[r#"
        gpu0  baac
    "#]]
    .assert_eq(&outcome.chart());
    assert!(outcome.journal.contains(r#"{"not_promised":{"could":4000000}}"#));
}

#[test]
fn best_effort_jobs_run_until_a_lease_begins() {
    // b arrives inside the first slot and is examined in the second.
    let mut case = case(
        r#"{"lease_s": 8, "slot_s": 2, "safety": 1.0, "sign": "minus", "short_s": 0}"#,
        "1x1",
        "s 0 1 8, b 1 1 8",
        &[(0, 16)],
    );
    expect![[r#"
        gpu0  ..bbbbbbaaaaaaaabb
    "#]]
    .assert_eq(&case.run().chart());
    // With short leases the SLO job may run ahead of its plan.
    case.params.insert("short_s".into(), 8.into());
    expect![[r#"
        gpu0  aaaaaaaabbbbbbbb
    "#]]
    .assert_eq(&case.run().chart());
}

#[test]
fn a_soft_deadline_yields_to_a_hard_one() {
    let mut case = case(&unit(""), "1x1", "u 0 1 2, v 0 1 2", &[(0, 4), (1, 2)]);
    let due = |s: f64, value: f64| (Time::from_secs(s), Number::of(value));
    case.jobs[0].spec.deadline_values = vec![due(2.0, 10.0), due(4.0, 8.0)];
    let outcome = case.run();
    expect![[r#"
        gpu0  bbaa
    "#]]
    .assert_eq(&outcome.chart());
    assert!(!outcome.journal.contains("planned_by_rule"));
    // If the integer program fails, the failure is counted and the heuristic's plan is carried
    // out.
    case.params = serde_json::from_str(&unit(r#", "exact_nodes": 0"#)).unwrap();
    let limited = case.run();
    assert!(limited.journal.contains(r#"{"planned_by_rule":1}"#));
    assert_eq!(limited.finished, outcome.finished);
}

#[test]
fn three_gpus_are_planned_as_four() {
    let deadlines = [(0, 2), (1, 2), (2, 2)];
    let outcome = run(&unit(""), "1x8", "a 0 3 2, b 0 3 2, c 0 2 2", &deadlines);
    expect![[r#"
        gpu0  aa
        gpu1  aa
        gpu2  aa
        gpu3  bb
        gpu4  bb
        gpu5  bb
        gpu6  cc
        gpu7  cc
    "#]]
    .assert_eq(&outcome.chart());
    assert!(outcome.journal.contains("not_promised"));
}

#[test]
fn a_job_past_its_estimate_loses_its_promise_and_keeps_running() {
    let mut case = case(&unit(""), "1x1", "a 0 1 2, b 0 1 1, c 0 1 3", &[(0, 9)]);
    case.jobs[0].work = 4.0;
    let outcome = case.run();
    expect![[r#"
        gpu0  aaaabccc
    "#]]
    .assert_eq(&outcome.chart());
    assert!(outcome.journal.contains("past_estimate"));
}

#[test]
fn a_job_that_cannot_meet_its_deadline_is_lost_but_still_runs() {
    let params = serde_json::from_str(&unit("")).unwrap();
    let policy = crate::policy::find("chronus").unwrap().build(&params).unwrap();
    let cluster = "1x1".parse().unwrap();
    let mut engine = Engine::new(&cluster, Costs::default(), policy, Box::new(Undisturbed), 0);
    let profile =
        engine.add_profile(Profile { restart: Some(Span::ZERO), ..Profile::of_step(1.0) });
    let mut spec = Spec::training(1, 2.0, profile);
    spec.deadline = Some(Time::from_secs(3.0));
    let job = engine.add_job(spec);
    let promised = engine.step(Time::ZERO, &[Event::Submitted(job)]).notes[0].reason;
    assert_eq!(promised, Reason::Promised { by: Time::from_secs(3.0) });
    let lost = |engine: &mut Engine, at: f64| {
        engine.step(Time::from_secs(at), &[Event::Started(job)]);
        let failed =
            Event::Failed { job, reason: Reason::NodeLost(NodeIdx(0)), done: Number::default() };
        let step = engine.step(Time::from_secs(at + 1.0), &[failed]);
        assert!(matches!(step.actions, [Action::Start(..)]), "the job is restarted");
        step.notes.iter().any(|n| n.reason == Reason::DeadlineLost)
    };
    assert!(!lost(&mut engine, 0.0), "two leases are left for two leases of work");
    assert!(lost(&mut engine, 1.0), "one lease is left for two leases of work");
}

#[test]
fn a_job_that_can_finish_inside_the_lease_is_guaranteed_it() {
    // No whole lease ends before the deadline of s, but the rest of this lease is long enough.
    let params = r#"{"lease_s": 8, "slot_s": 2, "safety": 1.0}"#;
    expect![[r#"
        gpu0  aabbbaaaaaaa
    "#]]
    .assert_eq(&run(params, "1x1", "b 0 1 9, s 1 1 3", &[(1, 7)]).chart());
    let long = r#"{"lease_s": 8, "slot_s": 2, "safety": 1.0, "short_s": 0}"#;
    expect![[r#"
        gpu0  aaaaaaaaabbb
    "#]]
    .assert_eq(&run(long, "1x1", "b 0 1 9, s 1 1 3", &[(1, 7)]).chart());
}
