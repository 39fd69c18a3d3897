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

fn check(truths: usize, all: &[Tried], wait_s: Option<f64>, expected: &Expect) {
    let advice = advise(&all_worlds(truths), all, 10, Some(400.0), wait_s);
    let mut text = String::new();
    for one in &advice.policies {
        let shares = [one.sooner.mean, one.sooner.low, one.sooner.high].map(percent);
        let saved = hours(one.saved_gpu_hours);
        let [mean, low, high] = shares;
        text += &format!(
            "{}: {:?}, {mean} ({low} to {high}), saved {saved}\n",
            one.policy, one.verdict
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
    let same = tried("same", &[525.0, 520.0, 515.0]);
    check(
        1,
        &[today, same, good],
        Some(110.0),
        &expect![[r#"
        fifo: Today, 0 % (0 % to 0 %), saved 0
        good: Sooner, 50 % (48 % to 52 %), saved 25.0
        same: Sooner, 48 % (47 % to 49 %), saved 24.0
        Use good: jobs would have finished 50 % sooner on average than with fifo (48 % to 52 %).
        Between good and same there is no difference that these seeds can show.
        The same work would have held 25.0 GPU-hours less (23.8 to 26.2).
        Its 99th percentile of completion times is 50 % shorter.
        No policy at all could have made jobs finish more than 60 % sooner.
    "#]],
    );
}

#[test]
fn noise_is_not_recommended() {
    let today = tried("fifo", &[1000.0, 1000.0, 1000.0]);
    check(
        1,
        &[today, tried("luck", &[700.0, 1100.0, 900.0])],
        None,
        &expect![[r#"
        fifo: Today, 0 % (0 % to 0 %), saved 0
        luck: NoDifference, 10 % (−40 % to 60 %), saved 5.0
        Keep fifo: none of the other policies is sure to make jobs finish sooner.
        luck comes closest: no difference that these seeds and truths can show (−40 % to 60 %).
        No policy at all could have made jobs finish more than 60 % sooner.
    "#]],
    );
}

#[test]
fn a_saving_that_depends_on_the_truth_is_not() {
    let today = tried("fifo", &[1000.0; 6]);
    let packs = tried("packs", &[500.0, 1200.0, 510.0, 1210.0, 490.0, 1190.0]);
    check(
        2,
        &[today, packs],
        Some(100_000.0),
        &expect![[r#"
        fifo: Today, 0 % (0 % to 0 %), saved 0
        packs: Depends, 15 % (−22 % to 52 %), saved 7.5
        Keep fifo: none of the other policies is sure to make jobs finish sooner.
        packs comes closest: sooner if the truth is measured, but later if it is another (−22 % to 52 %).
        No policy at all could have made jobs finish more than 60 % sooner.
        Be careful: jobs waited 27.8 h on average in the history, and 100 s with fifo in the simulation, so that the assumed cluster, or today's policy, is unlike yours.
    "#]],
    );
}

#[test]
fn a_saving_under_some_truths_is_recommended_for_them() {
    let today = tried("fifo", &[1000.0; 6]);
    let packs = tried("packs", &[500.0, 1000.0, 510.0, 1000.0, 490.0, 1000.0]);
    let sure = tried("sure", &[900.0, 900.0, 910.0, 910.0, 890.0, 890.0]);
    check(
        2,
        &[today, sure, packs],
        None,
        &expect![[r#"
        fifo: Today, 0 % (0 % to 0 %), saved 0
        packs: SoonerOrEqual, 25 % (0 % to 52 %), saved 12.5
        sure: Sooner, 10 % (7.5 % to 12 %), saved 5.0
        Use packs if the truth is measured: jobs would have finished 50 % sooner on average than with fifo (48 % to 52 %).
        If it is utilization, there is no difference that these seeds can show (0 % to 0 %).
        In GPU time there is no difference that holds under every truth (0 to 26.2 GPU-hours saved).
        In the 99th percentile of completion times there is no difference that holds under every truth (0 % to 52 %).
        Whichever truth is right, sure would have made them finish 10 % sooner than fifo (7.5 % to 12 %).
        No policy at all could have made jobs finish more than 60 % sooner.
    "#]],
    );
}

#[test]
fn a_policy_that_leaves_jobs_out_is_not_compared() {
    let today = tried("fifo", &[1000.0, 1000.0, 1000.0]);
    let mut some = tried("some", &[100.0, 100.0, 100.0]);
    some.runs[1].finished = 99;
    check(
        1,
        &[today, some],
        None,
        &expect![[r#"
        fifo: Today, 0 % (0 % to 0 %), saved 0
        some: Unfinished, 90 % (90 % to 90 %), saved 45.0
        Keep fifo: none of the other policies is sure to make jobs finish sooner.
        No policy at all could have made jobs finish more than 60 % sooner.
        Policies left out: some did not finish all jobs, so that their times do not compare.
    "#]],
    );
}

#[test]
fn small_shares_keep_their_digits() {
    let shown = [0.314, 0.05, -0.021, -0.000_1, 0.0].map(percent);
    assert_eq!(shown, ["31 %", "5.0 %", "−2.1 %", "0 %", "0 %"]);
}
