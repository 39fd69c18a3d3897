//! Journals: reproducible, replayed, explained, and refused when they are invalid.

use crate::{GOOD, PUSHED, Room, gzip};
use expect_test::{Expect, expect};
use std::collections::BTreeSet;

/// A folder with the journal `j.jsonl` of [`PUSHED`] under a policy that preempts.
fn pushed() -> Room {
    let room = Room::with(&[("t.csv", PUSHED), ("old.html", "old")]);
    let _ = room.works("sim t.csv --cluster 1x1 -p srtf --journal j.jsonl");
    room
}

/// Checks that every reader of journals refuses these bytes with the same message.
fn broken(bytes: impl AsRef<[u8]>, expected: Expect) {
    let room = Room::with(&[("old.html", "old")]);
    room.put("j.jsonl", bytes);
    room.refuses("replay j.jsonl", expected);
    let words = room.run("replay j.jsonl").err;
    for line in
        ["explain long -j j.jsonl", "report j.jsonl -o old.html", "report j.jsonl -o new.html"]
    {
        let before = room.everything();
        let outcome = room.run(line);
        assert_eq!(
            (outcome.code, outcome.out, outcome.err),
            (Some(2), String::new(), words.clone()),
            "{line}"
        );
        assert!(room.everything() == before, "{line} has changed files");
    }
}

#[test]
fn a_journal_must_be_a_file() {
    let room = Room::with(&[("old.html", "old")]);
    room.refuses(
        "replay nope.jsonl",
        expect![[r#"
            error: could not read journal "nope.jsonl": no such file
        "#]],
    );
    room.refuses(
        "explain a -j .",
        expect![[r#"
            error: could not read journal ".": it is a directory
        "#]],
    );
    room.refuses(
        "report nope.jsonl -o old.html",
        expect![[r#"
            error: could not read journal "nope.jsonl": no such file
        "#]],
    );
    room.refuses(
        "report -o old.html",
        expect![[r#"
            error: the following required arguments were not provided:
              <JOURNALS>...

            Usage: roommate report --output <FILE> <JOURNALS>...

            For more information, try '--help'.
        "#]],
    );
}

#[test]
fn a_truncated_or_foreign_file_is_refused() {
    let good = pushed().text("j.jsonl");
    let lines: Vec<&str> = good.lines().collect();
    let without_end = lines[..lines.len() - 1].join("\n");
    broken(
        "",
        expect![[r#"
            error: could not read journal "j.jsonl": line 1: the file is empty
        "#]],
    );
    broken(
        "\n\n",
        expect![[r#"
            error: could not read journal "j.jsonl": line 1: the file is empty
        "#]],
    );
    broken(
        GOOD,
        expect![[r#"
            error: could not read journal "j.jsonl": line 1: this is not a Roommate journal: it has no head
        "#]],
    );
    broken(
        [0xff, 0xfe, 0, 7],
        expect![[r#"
            error: could not read journal "j.jsonl": line 1: this is not a Roommate journal: it has no head
        "#]],
    );
    broken(
        good.replace("\"version\":1", "\"version\":2"),
        expect![[r#"
            error: could not read journal "j.jsonl": line 1: the journal has version 2, this program reads up to 1
            hint: read it with the program that wrote it, or a newer one
        "#]],
    );
    broken(
        good.replace("\"version\":1", "\"version\":2,\"new\":[]"),
        expect![[r#"
            error: could not read journal "j.jsonl": line 1: the journal has version 2, this program reads up to 1
            hint: read it with the program that wrote it, or a newer one
        "#]],
    );
    broken(
        good.replace("\"cluster\":\"1x1\"", "\"cluster\":\"1y1\""),
        expect![[r#"
            error: could not read journal "j.jsonl": line 1, column 153: could not read cluster "1y1": expected NODESxGPUS such as 8x8, found "1y1"
        "#]],
    );
    broken(
        &without_end,
        expect![[r#"
            error: could not read journal "j.jsonl": line 13: the journal was cut off: there is no end line
        "#]],
    );
    broken(
        &without_end[..without_end.len() - 9],
        expect![[r#"
            error: could not read journal "j.jsonl": line 13, column 42: EOF while parsing a string
        "#]],
    );
    broken(
        &gzip(&good)[..15],
        expect![[r#"
            error: could not read journal "j.jsonl": line 1: the gzip data ends early, so the file is not complete
        "#]],
    );
}

#[test]
fn an_inconsistent_journal_is_refused() {
    let good = pushed().text("j.jsonl");
    let lines: Vec<&str> = good.lines().collect();
    let with = |at: usize, line: &str| [&lines[..at], &[line], &lines[at..]].concat().join("\n");
    broken(
        good.replace("\"preempted_by\":1", "\"preempted_by\":7"),
        expect![[r#"
            error: could not read journal "j.jsonl": line 9: a job, GPU or node that does not exist
        "#]],
    );
    broken(
        good.replace("{\"finished\":1}", "{\"finished\":7}"),
        expect![[r#"
            error: could not read journal "j.jsonl": line 11: a job, GPU or node that does not exist
        "#]],
    );
    broken(
        good.replace("{\"gpus\":[0]}", "{\"gpus\":[9]}"),
        expect![[r#"
            error: could not read journal "j.jsonl": line 6: a job, GPU or node that does not exist
        "#]],
    );
    broken(
        good.replace("\"job\":{\"idx\":1", "\"job\":{\"idx\":2"),
        expect![[r#"
            error: could not read journal "j.jsonl": line 8: jobs are not numbered in order
        "#]],
    );
    broken(
        with(4, "what is this"),
        expect![[r#"
            error: could not read journal "j.jsonl": line 5, column 1: expected value
        "#]],
    );
    broken(
        with(4, "{\"step\":{\"at\":-1}}"),
        expect![[r#"
            error: could not read journal "j.jsonl": line 5, column 16: invalid value: integer `-1`, expected u64
        "#]],
    );
    broken(
        with(4, "{\"party\":{}}"),
        expect![[r#"
            error: could not read journal "j.jsonl": line 5, column 8: unknown variant `party`, expected one of `head`, `profile`, `team`, `job`, `step`, `end`
        "#]],
    );
    broken(
        with(4, lines[0]),
        expect![[r#"
            error: could not read journal "j.jsonl": line 5: a second head
        "#]],
    );
    broken(
        with(6, "{\"step\":{\"at\":5}}\n{\"step\":{\"at\":4}}"),
        expect![[r#"
            error: could not read journal "j.jsonl": line 8: time runs backwards
        "#]],
    );
    broken(
        format!("{good}{}", lines[1]),
        expect![[r#"
            error: could not read journal "j.jsonl": line 15: there is something after the end line
        "#]],
    );
}

#[test]
fn one_invalid_journal_prevents_the_report() {
    let room = pushed();
    room.put("cut.jsonl", &room.bytes("j.jsonl")[..500]);
    room.refuses(
        "report j.jsonl cut.jsonl -o old.html",
        expect![[r#"
            error: could not read journal "cut.jsonl": line 5, column 39: EOF while parsing a string
        "#]],
    );
    let outcome = room.run("report j.jsonl j.jsonl -o old.html");
    assert_eq!((outcome.code, outcome.err.as_str()), (Some(0), "report: old.html\n"));
    assert!(room.text("old.html").contains("srtf (2)"));
}

#[test]
fn replay_prints_same_or_the_first_difference() {
    let room = pushed();
    let good = room.text("j.jsonl");
    assert_eq!(room.works("replay j.jsonl"), "same: 7 steps, 4 actions\n");
    room.put("renamed", gzip(&good));
    assert_eq!(room.works("replay renamed"), "same: 7 steps, 4 actions\n");
    assert_eq!(room.works("replay j.jsonl -o csv"), "same,steps,actions\ntrue,7,4\n");
    room.put("other.jsonl", good.replace("{\"stop\":0},", ""));
    let outcome = room.run("replay other.jsonl");
    expect![[r#"
        different at step 3 (1m 40s)
          recorded  {"at":100000000,"facts":[{"submitted":1}],"actions":[{"start":[1,{"gpus":[0]}]}],"notes":[{"job":0,"why":{"preempted_by":1}},{"job":0,"why":{"no_room":{"need":1,"idle":0}}}]}
          replayed  {"at":100000000,"facts":[{"submitted":1}],"actions":[{"stop":0},{"start":[1,{"gpus":[0]}]}],"notes":[{"job":0,"why":{"preempted_by":1}},{"job":0,"why":{"no_room":{"need":1,"idle":0}}}]}
    "#]].assert_eq(&outcome.out);
    assert_eq!((outcome.code, outcome.err.as_str()), (Some(1), ""));
    let outcome = room.run("replay other.jsonl -o json");
    let answer: serde_json::Value = serde_json::from_str(&outcome.out).unwrap();
    assert_eq!(outcome.code, Some(1));
    assert_eq!((&answer["same"], &answer["difference"]["step"]), (&false.into(), &3.into()));
    room.put("unknown.jsonl", good.replace("\"policy\":\"srtf\"", "\"policy\":\"lottery\""));
    room.refuses(
        "replay unknown.jsonl",
        expect![[r#"
            error: could not read journal "unknown.jsonl": there is no policy "lottery"
            hint: there are fifo, fifo-backfill, sjf, srtf, srsf, tiresias, tiresias-gittins, gandiva, gandiva-tiresias-style, muri-s, muri-l, muri-l-worst-ordering, muri-l-no-blossom, antman, gavel, gavel-packed, gavel-makespan, gavel-finish-time, gavel-fifo, gavel-allox, gavel-couples, horus, horus-plus, synergy-proportional, synergy-greedy, synergy-tune, synergy-opt, chronus, mps, mps-split, time-slicing, random-colocate, kernel-est, iadeep, iadeep-no-tuner, iadeep-no-predictor, mudi, mudi-priority, mudi-published, gslice-like, gpulets-like, muxflow-like, roommate
        "#]],
    );
}

/// Decisions made on a real GPU are repeated from the recorded facts.
#[test]
fn journals_of_a_real_gpu_replay() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/results/h200");
    let names = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    let journals = names.filter(|p| p.to_string_lossy().ends_with(".journal.jsonl"));
    let mut policies = BTreeSet::new();
    for journal in journals {
        let text = std::fs::read_to_string(&journal).unwrap();
        let head: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
        policies.insert(head["head"]["policy"].as_str().unwrap().to_string());
        let room = Room::with(&[("real.jsonl", &text)]);
        let outcome = room.works("replay real.jsonl");
        assert!(outcome.starts_with("same: "), "{}: {outcome}", journal.display());
    }
    assert!(policies.len() >= 3, "{policies:?}");
}

#[test]
fn a_mix_on_a_real_gpu_is_predicted_from_measured_profiles() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/results/h200");
    let read = |name: &str| std::fs::read_to_string(format!("{folder}/{name}")).unwrap();
    let (journal, profiles) = (read("mix.journal.jsonl"), read("mix/profiles.jsonl"));
    let room = Room::with(&[("real.jsonl", &journal), ("measured.jsonl", &profiles)]);
    expect![[r#"
        prediction       alone   predicted  real     error
        resnet50-0       28.8 s  44.8 s     47.8 s   -6.1%
        gpt2-1           35.1 s  41.7 s     41.7 s   +0.1%
        resnet18-2       31.1 s  67.7 s     70.1 s   -3.4%
        bert-3           28.4 s  63.4 s     64.5 s   -1.7%
        lstm-4           28.6 s  86.7 s     90.3 s   -3.9%
        mobilenetv3l-5   34.6 s  100.1 s    102.1 s  -2.0%
        resnet50-6       21.6 s  98.5 s     101.3 s  -2.7%
        gpt2-7           27.7 s  117.8 s    117.2 s  +0.5%
        resnet18-8       23.4 s  117.7 s    118.8 s  -0.9%
        bert-9           22.7 s  2.3 min    2.2 min  +4.1%
        lstm-10          21.1 s  2.2 min    2.1 min  +0.6%
        mobilenetv3l-11  25.5 s  2.4 min    2.4 min  +2.8%
        mean error 2.4%, largest 6.1%
    "#]]
    .assert_eq(&room.works("predict real.jsonl --profiles measured"));
    let outcome = room.json("predict real.jsonl --profiles measured");
    assert!(outcome["mean_error"].as_f64().unwrap() < 0.05, "{outcome}");
    assert!(outcome["worst_error"].as_f64().unwrap() < 0.10, "{outcome}");
}

#[test]
fn explain_prints_the_history_of_a_job() {
    let room = pushed();
    expect![[r#"
        history of long:
            0.0s  submitted; GPUs not held: 1, other jobs waiting: 0
            0.0s  started on node 0: GPU 0
            0.0s  makes progress
          1m 40s  preempted by job short
          1m 40s  does not fit: needs 1 GPUs, 0 idle in the cluster
          1m 40s  asked to leave its GPUs
          1m 40s  stopped with 100 steps done
          1m 50s  started on node 0: GPU 0
          2m 52s  makes progress
         17m 52s  finished
    "#]]
    .assert_eq(&format!("history of long:\n{}", room.works("explain long -j j.jsonl")));
    let history = room.json("explain short -j j.jsonl");
    assert_eq!(history["job"], "short");
    assert_eq!(history["moments"][0]["at_s"], 100.0);
    let csv = room.works("explain long -j j.jsonl -o csv");
    assert!(csv.starts_with("at_s,what\n0,\"submitted; GPUs not held: 1"), "{csv}");
    room.refuses(
        "explain LON -j j.jsonl",
        expect![[r#"
            error: there is no job "LON" in j.jsonl
            hint: did you mean "long"?
        "#]],
    );
    room.refuses(
        "explain other -j j.jsonl",
        expect![[r#"
            error: there is no job "other" in j.jsonl
            hint: names of jobs: `roommate ps`, or the ids of the trace
        "#]],
    );
}

#[test]
fn the_journal_depends_on_the_seed() {
    let room = Room::with(&[]);
    let sim = |seed: u32, to: &str| {
        let world = "--cluster 2x4 --node-mtbf 20 --node-repair 0.5 --crash 0.3";
        let result = room.json(&format!("sim --seed {seed} {world} --journal {to}"));
        assert!(result["failures"].as_u64() > Some(0), "{result}");
        let settled = ["finished", "failed", "rejected"].map(|k| result[k].as_u64().unwrap());
        assert_eq!(settled.iter().sum::<u64>(), 500, "{result}");
    };
    sim(1, "a.jsonl");
    sim(1, "b.jsonl");
    sim(1, "c.jsonl.gz");
    sim(2, "d.jsonl");
    assert!(room.bytes("a.jsonl") == room.bytes("b.jsonl"));
    assert!(room.bytes("a.jsonl") != room.bytes("d.jsonl"));
    assert!(room.bytes("c.jsonl.gz").len() < room.bytes("a.jsonl").len() / 3);
    let same = room.works("replay a.jsonl");
    assert!(same.starts_with("same: "), "{same}");
    assert_eq!(room.works("replay c.jsonl.gz"), same);
    // The seed affects the faults, not only the generated jobs.
    let _ = room.works("trace synth -n 50 --cluster 1x4 -o t.csv");
    for seed in [1, 2] {
        let _ = room
            .works(&format!("sim t.csv --cluster 1x4 --crash 0.5 --seed {seed} --journal s{seed}"));
    }
    let body = |name: &str| room.text(name).split_once('\n').unwrap().1.to_owned();
    assert!(body("s1") != body("s2"));
}

#[test]
fn every_policy_replays_the_same_with_faults() {
    let room = Room::with(&[]);
    let faults = "--node-mtbf 10 --node-repair 1 --crash 0.2 --checkpoint 10 --start-cost 5";
    let world = format!("--cluster 1x4:v100,1x4:a100 {faults}");
    let _ = room.works(&format!("compare {world} -p all --journals all"));
    let journals: Vec<_> = std::fs::read_dir(room.path("all")).unwrap().collect();
    assert_eq!(journals.len(), roommate_core::policy::POLICIES.len());
    for journal in journals {
        let path = journal.unwrap().path();
        let same = room.works(&format!("replay {}", path.display()));
        assert!(same.starts_with("same: "), "{}: {same}", path.display());
    }
}
