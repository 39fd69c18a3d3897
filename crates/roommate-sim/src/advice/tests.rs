//! Worlds, intervals and sentences, on results of which the right answer is known.

#![expect(clippy::needless_raw_string_hashes, reason = "expect-test writes its texts so")]

use super::*;
use expect_test::{Expect, expect};

fn all_worlds(truths: usize) -> Vec<World> {
    let truths: Vec<String> = TRUTHS[..truths].iter().map(|t| (*t).to_owned()).collect();
    worlds(0..3, &truths, 100, 100, None)
}

/// A policy with these mean completion times, by seed and then truth; it holds half of 10 GPUs.
fn tried(policy: &str, jcts: &[f64]) -> Tried {
    let run = |jct: &f64| Metrics {
        jobs: 100,
        finished: 100,
        avg_jct_s: Some(*jct),
        p99_jct_s: Some(5.0 * jct),
        avg_queue_s: Some(100.0),
        makespan_s: 36.0 * jct,
        gpu_util: Some(0.5),
        ..Metrics::default()
    };
    Tried { policy: policy.into(), knows_durations: false, runs: jcts.iter().map(run).collect() }
}

fn check(truths: usize, all: &[Tried], wait_s: Option<f64>, expected: Expect) {
    let advice = advise(&all_worlds(truths), all, 10, Some(400.0), wait_s);
    let mut text = String::new();
    for one in &advice.policies {
        let shares = format!("{} ({} to {})", one.sooner.mean, one.sooner.low, one.sooner.high);
        text += &format!(
            "{}: {:?}, {shares}, saved {}\n",
            one.policy, one.verdict, one.saved_gpu_hours
        );
    }
    text += &advice.advice.join("\n");
    expected.assert_eq(&(text + "\n"));
}

#[test]
fn worlds_differ_by_seed_and_truth_only() {
    let truths = TRUTHS.map(String::from);
    let all = worlds(3..5, &truths, 1_000, 200, None);
    assert_eq!(all.len(), 6);
    assert_eq!(all, worlds(3..5, &truths, 1_000, 200, None), "the same seeds, the same worlds");
    assert!(all.iter().all(|w| w.jobs.len() == 200 && w.jobs.end <= 1_000));
    assert!(all.iter().all(|w| (15.0..=240.0).contains(&w.restart_s)));
    for three in all.chunks(3) {
        assert!(
            three.iter().all(|w| (&w.jobs, w.restart_s) == (&three[0].jobs, three[0].restart_s))
        );
    }
    assert_ne!((&all[0].jobs, all[0].restart_s), (&all[3].jobs, all[3].restart_s));
    let whole = worlds(0..1, &truths, 50, 200, Some(62.0));
    assert_eq!((whole[0].jobs.clone(), whole[0].restart_s), (0..50, 62.0));
}

#[test]
fn a_saving_in_every_truth_is_recommended() {
    let today = tried("fifo", &[1000.0, 1000.0, 1000.0]);
    let good = tried("good", &[500.0, 510.0, 490.0]);
    let same = tried("same", &[505.0, 500.0, 495.0]);
    check(1, &[today, same, good], Some(110.0), expect![[r#""#]]);
}

#[test]
fn noise_is_not_recommended() {
    let today = tried("fifo", &[1000.0, 1000.0, 1000.0]);
    check(1, &[today, tried("luck", &[700.0, 1100.0, 900.0])], None, expect![[r#""#]]);
}

#[test]
fn a_saving_that_depends_on_the_truth_is_not() {
    let today = tried("fifo", &[1000.0; 6]);
    let packs = tried("packs", &[500.0, 1200.0, 510.0, 1210.0, 490.0, 1190.0]);
    check(2, &[today, packs], Some(100_000.0), expect![[r#""#]]);
}

#[test]
fn a_policy_that_leaves_jobs_out_is_not_compared() {
    let today = tried("fifo", &[1000.0, 1000.0, 1000.0]);
    let mut some = tried("some", &[100.0, 100.0, 100.0]);
    some.runs[1].finished = 99;
    check(1, &[today, some], None, expect![[r#""#]]);
}

#[test]
fn small_shares_keep_their_digits() {
    let shown = [0.314, 0.05, -0.021, -0.000_1, 0.0].map(percent);
    assert_eq!(shown, ["31 %", "5.0 %", "−2.1 %", "0 %", "0 %"]);
}
