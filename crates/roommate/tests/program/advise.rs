//! `roommate advise` and the import of histories: from what sacct prints to a report.

use crate::{GOOD, Room};
use expect_test::expect;
use serde_json::Value;

/// The example of the guide.
const SACCT: &str = include_str!("../../../../examples/sacct.txt");

/// Few worlds and few jobs: what is tested is the way, not the figures.
const QUICK: &str = "--seeds 2 --jobs 60 --policies tiresias,gandiva";

#[test]
fn what_sacct_prints_becomes_a_trace_and_a_guess() {
    let room = Room::with(&[("jobs.txt", SACCT)]);
    let outcome = room.run("trace convert jobs.txt -o past.csv");
    assert_eq!(outcome.code, Some(0), "{}", outcome.err);
    expect![[r#"
        left out 5 jobs without a GPU
        left out 2 jobs that never started
        left out 30 rows of steps, which belong to jobs
        joined 1 further attempt of jobs to their first
        The cluster is guessed from what was in use: at most 16 GPUs at the same time, so --cluster 2x8:h100=1. If yours has more, name it: savings are smaller there.
    "#]].assert_eq(&outcome.err);
    let stats = room.json("trace stats past.csv --cluster 2x8");
    let read = room.json("trace stats jobs.txt --cluster 2x8");
    assert_eq!(read["format"], "sacct");
    for key in ["jobs", "gpu_hours", "offered_load", "queue_s", "statuses", "teams"] {
        assert_eq!(stats[key], read[key], "{key}");
    }
}

#[test]
fn a_history_becomes_a_report() {
    let room = Room::with(&[("jobs.txt", SACCT)]);
    let outcome = room.run(&format!("advise jobs.txt {QUICK} --report out/advice.html"));
    assert_eq!(outcome.code, Some(0), "{}", outcome.err);
    for expected in
        ["lower bound", "fifo-backfill", "today", "The cluster is guessed", "jobs in a row"]
    {
        assert!(outcome.out.contains(expected), "{expected}: {}", outcome.out);
    }
    let page = room.text("out/advice.html");
    for expected in
        ["fig-sooner", "fig-saved", "saturated", "What was assumed", "roommate advise jobs.txt"]
    {
        assert!(page.contains(expected), "{expected}");
    }
    // It can be handed on: nothing in it says who ran what.
    for name in ["ann", "cleo", "resnet-sweep", "vocoder", "speech"] {
        assert!(
            !page.contains(&format!(">{name}<")) && !page.contains(&format!("\"{name}\"")),
            "{name}"
        );
    }
}

#[test]
fn the_same_seeds_give_the_same_advice() {
    let room = Room::with(&[("jobs.txt", SACCT)]);
    let ask = |flags: &str| room.json(&format!("advise jobs.txt {QUICK} {flags}"));
    let first = ask("--threads 1");
    assert_eq!(first, ask("--threads 2"));
    assert_ne!(first["policies"], ask("--seed 5")["policies"]);
    assert_eq!(
        (&first["cluster"], &first["cluster_guessed"]),
        (&"2x8:h100=1".into(), &true.into())
    );
    assert_eq!((&first["today"], &first["jobs_per_world"]), (&"fifo-backfill".into(), &60.into()));
    assert_eq!(first["worlds"].as_array().unwrap().len(), 6);
    let policies = first["policies"].as_array().unwrap();
    assert_eq!(policies[0]["verdict"], "today");
    assert_eq!(policies.len(), 3);
    let number = |value: &Value| value.as_f64().unwrap();
    for one in &policies[1..] {
        let [low, mean, high] = ["low", "saved_gpu_hours", "high"].map(|key| number(&one[key]));
        assert!(low <= mean && mean <= high, "{one}");
        // The interval holds under each truth: it is around that of every one.
        let sooner = &one["sooner"];
        for by_truth in one["by_truth"].as_array().unwrap() {
            let own = &by_truth["sooner"];
            assert!(number(&sooner["low"]) <= number(&own["low"]), "{one}");
            assert!(number(&sooner["high"]) >= number(&own["high"]), "{one}");
        }
    }
    assert!(number(&first["bound_s"]) <= number(&policies[1]["mean_jct_s"]));
    assert!(!first["advice"].as_array().unwrap().is_empty());
    let csv = room.works(&format!("advise jobs.txt {QUICK} -o csv"));
    assert_eq!(csv.lines().count(), 4, "{csv}");
}

#[test]
fn an_idle_cluster_is_told_to_keep_its_policy() {
    // One job after the other: no policy can do anything for them.
    let rows = (0..40).map(|i| format!("j{i},{},1,600,0\n", i * 1000)).collect::<Vec<_>>().concat();
    let room = Room::with(&[]);
    room.put("t.csv", format!("id,submit_s,gpus,duration_s,queue_s\n{rows}"));
    let found = room.json("advise t.csv --cluster 1x4 --seeds 2 --policies tiresias");
    let first = found["advice"][0].as_str().unwrap();
    assert!(first.starts_with("Keep fifo-backfill: none of the other policies"), "{first}");
    assert_eq!(found["policies"][1]["verdict"], "no-difference");
}

#[test]
fn advice_needs_a_cluster_and_another_policy() {
    let room = Room::with(&[("t.csv", GOOD), ("jobs.txt", SACCT)]);
    room.refuses(
        "advise t.csv",
        expect![[r#"
        error: the trace does not say when jobs started, so no cluster can be guessed
        hint: name it: --cluster NODESxGPUS, such as 8x8
    "#]],
    );
    room.refuses(
        "advise jobs.txt --policies fifo-backfill",
        expect![[r#"
        error: there is no policy to compare "fifo-backfill" with
        hint: name another one with --policies
    "#]],
    );
    room.refuses(
        "advise jobs.txt --seeds 1",
        expect![[r#"
        error: invalid value '1' for '--seeds <N>': 1 is not in 2..=1000

        For more information, try '--help'.
    "#]],
    );
    room.refuses(
        "advise jobs.txt --report jobs.txt",
        expect![[r#"
        error: could not write jobs.txt: it is an input file
        hint: give another output file
    "#]],
    );
    room.refuses(
        "advise jobs.txt --cluster 1x8:h100",
        expect![[r#"
        left out 5 jobs without a GPU
        left out 2 jobs that never started
        left out 30 rows of steps, which belong to jobs
        joined 1 further attempt of jobs to their first
        error: job "4147" can never run on 1x8:h100=1: it needs 16 suitable GPUs, there are 8
        hint: use another --cluster, or --skip-bad-rows to drop such jobs and count them
    "#]],
    );
}

#[test]
fn pods_are_read_like_any_trace() {
    let pod = |name: &str, gpus: u32, start: &str, end: &str| {
        format!(
            r#"{{"apiVersion":"v1","kind":"Pod","metadata":{{"name":"{name}","namespace":"ml",
            "creationTimestamp":"2026-11-01T10:00:00Z"}},"spec":{{"containers":[{{"resources":
            {{"limits":{{"nvidia.com/gpu":"{gpus}"}}}}}}]}},"status":{{"phase":"Succeeded",
            "startTime":"2026-11-01T{start}Z","containerStatuses":[{{"state":{{"terminated":
            {{"finishedAt":"2026-11-01T{end}Z"}}}}}}]}}}}"#
        )
    };
    let pods =
        [pod("a", 4, "10:00:10", "11:00:10"), pod("b", 2, "10:30:00", "10:40:00")].join("\n");
    let room = Room::with(&[("pods.json", &pods)]);
    let outcome = room.run("trace convert pods.json");
    expect![[r#"
        id,submit_s,gpus,duration_s,queue_s,attempts,model,team,status
        ml/a,0,4,3600,10,1,a,ml,passed
        ml/b,0,2,600,1800,1,b,ml,passed
        The cluster is guessed from what was in use: at most 6 GPUs at the same time, so --cluster 2x4. If yours has more, name it: savings are smaller there.
    "#]].assert_eq(&(outcome.out + &outcome.err));
}
