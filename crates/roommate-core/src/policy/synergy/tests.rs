//! Charts of Synergy.

use crate::performance::sensitivity::{Host, Sensitivity};
use crate::testing::TestCase;
use expect_test::expect;

/// Jobs called `x` run twice as fast with four cores as with their share of two; the speed of
/// all others does not depend on cores.
fn picture(policy: &str, params: &str, cluster: &str, jobs: &str) -> String {
    let mut case = TestCase::new(policy, cluster, jobs);
    case.params = serde_json::from_str(params).unwrap();
    let usual = Host { cpu_milli: 2_000, mib: 1_000 };
    let known = |cores: u32, speedup: f64| {
        Sensitivity::of_best(usual, Host { cpu_milli: cores * 1_000, mib: 1_000 }, speedup)
    };
    case.profiles = vec![case.profiles[0].clone(); 2];
    case.profiles[0].sensitivity = known(1, 1.0).map(Box::new);
    case.profiles[1].sensitivity = known(4, 2.0).map(Box::new);
    for job in case.jobs.iter_mut().filter(|a| a.name.starts_with('x')) {
        job.spec.profile.0 = 1;
    }
    case.run().chart()
}

const FIFO: &str = r#"{"order": "fifo", "round_s": 4, "top_up": false}"#;

#[test]
fn proportional_gives_every_job_its_share() {
    expect![[r#"
        gpu0  aaaaaaaa
        gpu1  bbbb
    "#]]
    .assert_eq(&picture("synergy-proportional", FIFO, "1x2:4c", "x 0 1 8, b 0 1 4"));
}

#[test]
fn greedy_leaves_gpus_idle() {
    expect![[r#"
        gpu0  aaaabbbb
        gpu1
    "#]]
    .assert_eq(&picture("synergy-greedy", FIFO, "1x2:4c", "x 0 1 8, b 0 1 4"));
}

#[test]
fn tune_takes_from_jobs_with_more_than_their_share() {
    // `x` starts with four cores, falls back to two when `b` arrives, and has four again after
    // it.
    expect![[r#"
        gpu0  aaaaaaa
        gpu1  ..bb
    "#]]
    .assert_eq(&picture("synergy-tune", FIFO, "1x2:4c", "x 0 1 12, b 2 1 2"));
}

#[test]
fn cores_that_a_job_does_not_need_are_used() {
    // Each node gets a job that needs four cores and one that needs one: no job falls back.
    let jobs = "x 0 1 8, xx 0 1 8, b 0 1 4, c 0 1 4";
    expect![[r#"
        gpu0  aaaa
        gpu1  cccc
        gpu2  bbbb
        gpu3  dddd
    "#]]
    .assert_eq(&picture("synergy-tune", FIFO, "2x2:5c", jobs));
}

#[test]
fn the_order_decides_which_job_runs_first() {
    let of = |order: &str| {
        let params = format!(r#"{{"order": "{order}", "round_s": 2}}"#);
        picture("synergy-tune", &params, "1x1:4c", "a 0 1 6, b 1 1 2, c 2 1 4")
    };
    expect![[r#"
        gpu0  aaaaaabbcccc
    "#]]
    .assert_eq(&of("fifo"));
    expect![[r#"
        gpu0  aabbaaaacccc
    "#]]
    .assert_eq(&of("srtf"));
    expect![[r#"
        gpu0  aabbccaaccaa
    "#]]
    .assert_eq(&of("las"));
    expect![[r#"
        gpu0  aabbccaaccaa
    "#]]
    .assert_eq(&of("ftf"));
}

#[test]
fn idle_gpus_do_not_wait_for_the_next_round() {
    let of = |fill: bool| {
        let params = format!(r#"{{"order": "fifo", "round_s": 4, "fill": {fill}}}"#);
        picture("synergy-tune", &params, "1x1:4c", "a 0 1 2, b 1 1 2")
    };
    expect![[r#"
        gpu0  aabb
    "#]]
    .assert_eq(&of(true));
    expect![[r#"
        gpu0  aa..bb
    "#]]
    .assert_eq(&of(false));
}
