//! Invalid inputs: each error names the place, has a hint where possible, and changes no file.

use crate::{GOOD, Room, gzip};
use expect_test::{Expect, expect};

/// Checks that a trace of these bytes is refused and older files stay unchanged.
fn trace(bytes: impl AsRef<[u8]>, expected: Expect) {
    let room = Room::with(&[("old.jsonl", "old"), ("old.html", "old")]);
    room.put("t.csv", bytes);
    room.refuses("sim t.csv --cluster 1x2 --journal old.jsonl", expected);
    for line in [
        "sim t.csv --cluster 1x2 --journal new.jsonl",
        "compare t.csv --cluster 1x2 --journals new --report old.html -p fifo",
        "compare t.csv --cluster 1x2 --journals . --report new.html -p fifo",
    ] {
        let before = room.everything();
        let outcome = room.run(line);
        assert_eq!((outcome.code, outcome.out.as_str()), (Some(2), ""), "{line}");
        assert!(room.everything() == before, "{line} has changed files");
    }
}

/// The same below the header of Roommate's own format.
fn rows(rows: &str, expected: Expect) {
    trace(format!("id,submit_s,gpus,duration_s\n{rows}\n"), expected);
}

#[test]
fn a_policy_in_another_process_has_to_listen() {
    let room = Room::with(&[("t.csv", GOOD), ("old.jsonl", "old")]);
    room.refuses(
        "sim t.csv --cluster 1x2 --policy-socket none.sock --journal old.jsonl",
        expect![[r#"
            error: could not connect to the policy at none.sock: No such file or directory (os error 2)
            hint: start the policy before the simulation; `roommate.lab` in Python does so
        "#]],
    );
}

#[test]
fn a_trace_must_be_a_file_with_jobs() {
    let room = Room::with(&[("old.jsonl", "old")]);
    room.refuses(
        "sim nope.csv --journal old.jsonl",
        expect![[r#"
            error: could not read trace "nope.csv": no such file
        "#]],
    );
    room.refuses(
        "sim . --journal old.jsonl",
        expect![[r#"
            error: could not read trace ".": it is a directory
        "#]],
    );
    room.refuses(
        "trace stats nope.csv",
        expect![[r#"
            error: could not read trace "nope.csv": no such file
        "#]],
    );
    room.refuses(
        "trace convert nope.csv -o old.jsonl",
        expect![[r#"
            error: could not read trace "nope.csv": no such file
        "#]],
    );
    trace(
        "",
        expect![[r#"
            error: could not read trace "t.csv": the file is empty
        "#]],
    );
    trace(
        " \n\n",
        expect![[r#"
            error: could not read trace "t.csv": the file is empty
        "#]],
    );
    trace(
        "id,submit_s,gpus,duration_s\n",
        expect![[r#"
            error: trace "t.csv" has no jobs
        "#]],
    );
}

#[test]
fn a_trace_must_have_a_known_format() {
    trace(
        "name,when\na,1\n",
        expect![[r#"
            error: could not read trace "t.csv": unknown trace format, first line "name,when"
            hint: pass --format with one of roommate, philly, helios, pai, muri, gavel, chronus, tiresias, elasticflow, synergy, sacct, kube; the columns of the roommate format are id, submit_s, gpus, duration_s
        "#]],
    );
    trace(
        "id,submit_s,duration_s\na,1,1\n",
        expect![[r#"
            error: could not read trace "t.csv": unknown trace format, first line "id,submit_s,duration_s"
            hint: pass --format with one of roommate, philly, helios, pai, muri, gavel, chronus, tiresias, elasticflow, synergy, sacct, kube; the columns of the roommate format are id, submit_s, gpus, duration_s
        "#]],
    );
    let room = Room::with(&[("t.csv", GOOD), ("quote.csv", "\"id,submit_s\n")]);
    room.refuses("sim t.csv --format tiresias", expect![[r#"
        error: could not read trace "t.csv": line 1: missing columns "job_id", "num_gpu", "submit_time", "duration"; expected job_id, num_gpu, submit_time, duration, found id, submit_s, gpus, duration_s
        hint: pass --format with one of roommate, philly, helios, pai, muri, gavel, chronus, tiresias, elasticflow, synergy, sacct, kube; the columns of the roommate format are id, submit_s, gpus, duration_s
    "#]]);
    room.refuses("sim quote.csv --format roommate", expect![[r#"
        error: could not read trace "quote.csv": line 1: a quoted field is not closed on its line
        hint: pass --format with one of roommate, philly, helios, pai, muri, gavel, chronus, tiresias, elasticflow, synergy, sacct, kube; the columns of the roommate format are id, submit_s, gpus, duration_s
    "#]]);
    room.refuses("sim t.csv --format exel", expect![[r#"
        error: invalid value 'exel' for '--format <FORMAT>'
          [possible values: auto, roommate, philly, helios, pai, muri, gavel, chronus, tiresias, elasticflow, synergy, sacct, kube]

        For more information, try '--help'.
    "#]]);
}

#[test]
fn numbers_in_a_trace_must_be_valid() {
    rows(
        "a,-1,1,1",
        expect![[r#"
            error: could not read trace "t.csv": line 2, column "submit_s": expected a number of at least 0, found "-1"
            hint: pass --skip-bad-rows to drop such rows and count them
        "#]],
    );
    rows(
        "a,0,1,-5",
        expect![[r#"
            error: could not read trace "t.csv": line 2, column "duration_s": expected a number of at least 0, found "-5"
            hint: pass --skip-bad-rows to drop such rows and count them
        "#]],
    );
    rows(
        "a,0,1,NaN",
        expect![[r#"
            error: could not read trace "t.csv": line 2, column "duration_s": expected a finite number, found "NaN"
            hint: pass --skip-bad-rows to drop such rows and count them
        "#]],
    );
    rows(
        "a,inf,1,1",
        expect![[r#"
            error: could not read trace "t.csv": line 2, column "submit_s": expected a finite number, found "inf"
            hint: pass --skip-bad-rows to drop such rows and count them
        "#]],
    );
    rows(
        "a,0,0,1",
        expect![[r#"
            error: could not read trace "t.csv": line 2, column "gpus": expected at least 1 GPU, found "0"
            hint: pass --skip-bad-rows to drop such rows and count them
        "#]],
    );
    rows(
        "a,0,1,1\nb,0,two,1",
        expect![[r#"
            error: could not read trace "t.csv": line 3, column "gpus": expected a number, found "two"
            hint: pass --skip-bad-rows to drop such rows and count them
        "#]],
    );
    rows(
        "a,0,1",
        expect![[r#"
            error: could not read trace "t.csv": line 2: expected 4 fields, found 3
            hint: pass --skip-bad-rows to drop such rows and count them
        "#]],
    );
    rows(
        "a,0,1,1\nb,0,1,1\na,5,1,1",
        expect![[r#"
            error: could not read trace "t.csv": line 4: duplicate job id "a"
            hint: pass --skip-bad-rows to drop such rows and count them
        "#]],
    );
    trace(
        r#"{"id":"a","submit_s":0,"gpus":"1","duration_s":1}"#,
        expect![[r#"
            error: could not read trace "t.csv": line 1: broken job: invalid type: string "1", expected a number, at character 33
            hint: pass --skip-bad-rows to drop such rows and count them
        "#]],
    );
}

#[test]
fn jobs_must_fit_the_cluster() {
    rows(
        "a,0,1,1\nb,0,3,1",
        expect![[r#"
            error: job "b" can never run on 1x2: it needs 3 suitable GPUs, there are 2
            hint: use another --cluster, or --skip-bad-rows to drop such jobs and count them
        "#]],
    );
    trace(
        "id,submit_s,gpus,duration_s,kinds\na,0,1,1,h100\n",
        expect![[r#"
            error: job "a" can never run on 1x2: it needs a GPU of model h100
            hint: use another --cluster, or --skip-bad-rows to drop such jobs and count them
        "#]],
    );
    let room = Room::with(&[("t.csv", "id,submit_s,gpus,duration_s,mem_mib\na,0,1,1,20000\n")]);
    room.put("wide.csv", "id,submit_s,gpus,duration_s\na,0,5,1\n");
    room.refuses(
        "sim wide.csv --cluster 1x2:v100,1x2:a100",
        expect![[r#"
            error: job "a" can never run on 1x2:v100,1x2:a100: it needs 5 suitable GPUs, there are 4
            hint: use another --cluster, or --skip-bad-rows to drop such jobs and count them
        "#]],
    );
    room.refuses("sim t.csv --cluster 1x1:v100", expect![[r#"
        error: job "a" can never run on 1x1:v100: no GPU has the memory, or no node the CPU, that it asks for
        hint: use another --cluster, or --skip-bad-rows to drop such jobs and count them
    "#]]);
    room.refuses("sim t.csv --cluster 1x1:v100 --skip-bad-rows", expect![[r#"
        dropped 1 job, the first: job "a" can never run on 1x1:v100: no GPU has the memory, or no node the CPU, that it asks for
        error: "t.csv" has no jobs that could run on 1x1:v100
    "#]]);
}

#[test]
fn bytes_that_are_not_utf8_are_refused() {
    let mut state = 1u32;
    let random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    trace(
        std::iter::repeat_with(random).take(10_000).collect::<Vec<_>>(),
        expect![[r#"
            error: could not read trace "t.csv": line 1: unknown trace format, first line is not valid UTF-8
            hint: pass --format with one of roommate, philly, helios, pai, muri, gavel, chronus, tiresias, elasticflow, synergy, sacct, kube; the columns of the roommate format are id, submit_s, gpus, duration_s
        "#]],
    );
    trace(
        b"id,submit_s,gpus,duration_s\na,0,1,1\nb\xff,0,1,1\n",
        expect![[r#"
            error: could not read trace "t.csv": line 3: not valid UTF-8
            hint: pass --skip-bad-rows to drop such rows and count them
        "#]],
    );
    let long = format!("{GOOD}{}\n", "x".repeat(10_000_000));
    trace(
        &long,
        expect![[r#"
            error: could not read trace "t.csv": line 5: the line is longer than 1024 KiB
        "#]],
    );
    trace(
        gzip(&long),
        expect![[r#"
            error: could not read trace "t.csv": line 5: the line is longer than 1024 KiB
        "#]],
    );
    let row = |i: u32| [format!("job{i},{i},1,"), (i * 7_919 % 1_000).to_string()].concat();
    let many = (0..5_000).map(row).collect::<Vec<_>>().join("\n");
    let whole = gzip(format!("id,submit_s,gpus,duration_s\n{many}"));
    trace(
        &whole[..15],
        expect![[r#"
            error: could not read trace "t.csv": line 1: the gzip data ends early, so the file is not complete
        "#]],
    );
    // The place depends on the compressor, but the error is always found.
    let room = Room::with(&[]);
    room.put("cut.gz", &whole[..whole.len() / 2]);
    room.put("flipped.gz", [&whole[..whole.len() - 8], &[0; 8]].concat());
    for (file, problem) in [("cut.gz", "the gzip data ends early"), ("flipped.gz", "broken gzip")] {
        let outcome = room.run(&format!("sim {file} --skip-bad-rows --journal new.jsonl"));
        assert_eq!((outcome.code, outcome.out.as_str()), (Some(2), ""), "{file}");
        assert!(outcome.err.contains(problem), "{}", outcome.err);
        assert!(!room.path("new.jsonl").exists());
    }
}

#[test]
fn bad_rows_are_dropped_and_counted_on_request() {
    let room = Room::with(&[]);
    let bad = "x,-1,1,1\nx,0,0,1\nx,0,1,NaN\nx,0,1\na,5,1,1\n\"x,0,1,1\nlarge,0,3,1\n";
    room.put("t.csv", format!("{GOOD}{bad}"));
    let outcome = room.run("sim t.csv --cluster 1x2 --skip-bad-rows -o json --journal new.jsonl");
    expect![[r#"
        dropped 6 bad rows, the first of them:
          could not read trace "t.csv": line 5, column "submit_s": expected a number of at least 0, found "-1"
          could not read trace "t.csv": line 6, column "gpus": expected at least 1 GPU, found "0"
          could not read trace "t.csv": line 7, column "duration_s": expected a finite number, found "NaN"
          could not read trace "t.csv": line 8: expected 4 fields, found 3
          could not read trace "t.csv": line 9: duplicate job id "a"
        dropped 1 job, the first: job "large" can never run on 1x2: it needs 3 suitable GPUs, there are 2
    "#]].assert_eq(&outcome.err);
    assert_eq!(outcome.code, Some(0));
    let result: serde_json::Value = serde_json::from_str(&outcome.out).unwrap();
    assert_eq!(
        (&result["dropped_rows"], &result["jobs"], &result["finished"]),
        (&7.into(), &3.into(), &3.into())
    );
    let compared = room.json("compare t.csv --cluster 1x2 --skip-bad-rows -p fifo");
    assert_eq!(compared["dropped_rows"], 7);
    room.put("none.csv", format!("id,submit_s,gpus,duration_s\n{}", bad.replace("a,5", "a,-5")));
    room.refuses("sim none.csv --cluster 1x2 --skip-bad-rows", expect![[r#"
        dropped 6 bad rows, the first of them:
          could not read trace "none.csv": line 2, column "submit_s": expected a number of at least 0, found "-1"
          could not read trace "none.csv": line 3, column "gpus": expected at least 1 GPU, found "0"
          could not read trace "none.csv": line 4, column "duration_s": expected a finite number, found "NaN"
          could not read trace "none.csv": line 5: expected 4 fields, found 3
          could not read trace "none.csv": line 6, column "submit_s": expected a number of at least 0, found "-5"
        dropped 1 job, the first: job "large" can never run on 1x2: it needs 3 suitable GPUs, there are 2
        error: "none.csv" has no jobs that could run on 1x2
    "#]]);
}

#[test]
fn sim_checks_policies_before_reading_files() {
    let room = Room::with(&[("old.jsonl", "old")]);
    let sim = |rest: &str, expected| {
        room.refuses(&format!("sim not-there.csv --journal old.jsonl {rest}"), expected);
    };
    sim(
        "-p tiresia",
        expect![[r#"
            error: there is no policy "tiresia"
            hint: there are fifo, fifo-backfill, sjf, srtf, srsf, tiresias, tiresias-gittins, gandiva, gandiva-tiresias-style, muri-s, muri-l, muri-l-worst-ordering, muri-l-no-blossom, antman, gavel, gavel-packed, gavel-makespan, gavel-finish-time, gavel-fifo, gavel-allox, gavel-couples, horus, horus-plus, synergy-proportional, synergy-greedy, synergy-tune, synergy-opt, chronus, mps, mps-split, time-slicing, random-colocate, kernel-est, iadeep, iadeep-no-tuner, iadeep-no-predictor, mudi, mudi-priority, mudi-published, gslice-like, gpulets-like, muxflow-like, roommate
        "#]],
    );
    sim(
        "--set foo=1",
        expect![[r#"
            error: --set "foo=1": policy "tiresias": unknown field `foo`, expected one of `bounds_gpu_s`, `promote_knob`, `service`, `order`, `placement`, `pack_limit`, `patience_s`, `dedicate_from`, `quantum`, `history_gpu_s`, `min_history`, `whole_second_wakes`
            hint: `roommate policies tiresias` lists its parameters
        "#]],
    );
    sim(
        "--set order=las --set promote_knob=soon",
        expect![[r#"
            error: --set "promote_knob=soon": policy "tiresias": invalid type: string "soon", expected f64
            hint: `roommate policies tiresias` lists its parameters
        "#]],
    );
    sim(
        "--set promote_knob=-1",
        expect![[r#"
            error: --set "promote_knob=-1": policy "tiresias": promote_knob: expected a number above 0
            hint: `roommate policies tiresias` lists its parameters
        "#]],
    );
    sim(
        "--set bounds_gpu_s=[3,2]",
        expect![[r#"
            error: --set "bounds_gpu_s=[3,2]": policy "tiresias": bounds_gpu_s: expected ascending numbers above 0
            hint: `roommate policies tiresias` lists its parameters
        "#]],
    );
    sim(
        "--set promote_knob",
        expect![[r#"
            error: --set "promote_knob": expected NAME=VALUE
            hint: for example --set backfill=true
        "#]],
    );
    sim(
        "--set =",
        expect![[r#"
            error: --set "=": policy "tiresias": unknown field ``, expected one of `bounds_gpu_s`, `promote_knob`, `service`, `order`, `placement`, `pack_limit`, `patience_s`, `dedicate_from`, `quantum`, `history_gpu_s`, `min_history`, `whole_second_wakes`
            hint: `roommate policies tiresias` lists its parameters
        "#]],
    );
    sim(
        "-p fifo --compat muri",
        expect![[r#"
            error: policy "fifo" has no parameters for --compat muri
            hint: these have: srtf, srsf, tiresias, muri-s, muri-l, muri-l-worst-ordering, muri-l-no-blossom, antman
        "#]],
    );
    sim(
        "--compat gavel",
        expect![[r#"
            error: policy "tiresias" has no parameters for --compat gavel
            hint: these have: gavel, gavel-packed, gavel-makespan, gavel-finish-time, gavel-fifo, gavel-allox, gavel-couples
        "#]],
    );
    sim(
        "--compat themis",
        expect![[r#"
            error: invalid value 'themis' for '--compat <NAME>'
              [possible values: muri, gavel, synergy]

            For more information, try '--help'.
        "#]],
    );
}

#[test]
fn compare_checks_policies_before_reading_files() {
    let room = Room::with(&[("old.jsonl", "old")]);
    let compare = |rest: &str, expected| {
        room.refuses(&format!("compare not-there.csv --journals . {rest}"), expected);
    };
    compare(
        "-p fifo,nope",
        expect![[r#"
            error: there is no policy "nope"
            hint: there are fifo, fifo-backfill, sjf, srtf, srsf, tiresias, tiresias-gittins, gandiva, gandiva-tiresias-style, muri-s, muri-l, muri-l-worst-ordering, muri-l-no-blossom, antman, gavel, gavel-packed, gavel-makespan, gavel-finish-time, gavel-fifo, gavel-allox, gavel-couples, horus, horus-plus, synergy-proportional, synergy-greedy, synergy-tune, synergy-opt, chronus, mps, mps-split, time-slicing, random-colocate, kernel-est, iadeep, iadeep-no-tuner, iadeep-no-predictor, mudi, mudi-priority, mudi-published, gslice-like, gpulets-like, muxflow-like, roommate
        "#]],
    );
    compare(
        "-p fifo,fifo",
        expect![[r#"
            error: policy "fifo" is named twice
            hint: name each policy once
        "#]],
    );
    compare(
        "-p fifo,sjf --set sjf.nope=8",
        expect![[r#"
            error: --set "nope=8": policy "sjf": unknown field `nope`, expected one of `rule`, `patience_s`, `dedicate_from`
            hint: `roommate policies sjf` lists its parameters
        "#]],
    );
    compare(
        "-p fifo,sjf --set srtf.rule=8",
        expect![[r#"
            error: --set "srtf.rule=8": policy "srtf" is not among those to run
            hint: name it in --policies too
        "#]],
    );
    compare(
        "-p fifo,sjf --set nope.rule=8",
        expect![[r#"
            error: --set "nope.rule=8": there is no policy "nope"
            hint: there are fifo, fifo-backfill, sjf, srtf, srsf, tiresias, tiresias-gittins, gandiva, gandiva-tiresias-style, muri-s, muri-l, muri-l-worst-ordering, muri-l-no-blossom, antman, gavel, gavel-packed, gavel-makespan, gavel-finish-time, gavel-fifo, gavel-allox, gavel-couples, horus, horus-plus, synergy-proportional, synergy-greedy, synergy-tune, synergy-opt, chronus, mps, mps-split, time-slicing, random-colocate, kernel-est, iadeep, iadeep-no-tuner, iadeep-no-predictor, mudi, mudi-priority, mudi-published, gslice-like, gpulets-like, muxflow-like, roommate
        "#]],
    );
    compare(
        "--set rule=0.5",
        expect![[r#"
            error: --set "rule=0.5": expected POLICY.NAME=VALUE
            hint: for example --set tiresias.promote_knob=8
        "#]],
    );
    compare(
        "-p srtf,fifo --compat muri",
        expect![[r#"
            error: policy "fifo" has no parameters for --compat muri
            hint: these have: srtf, srsf, tiresias, muri-s, muri-l, muri-l-worst-ordering, muri-l-no-blossom, antman
        "#]],
    );
    room.refuses(
        "policies tiresia",
        expect![[r#"
            error: there is no policy "tiresia"
            hint: there are fifo, fifo-backfill, sjf, srtf, srsf, tiresias, tiresias-gittins, gandiva, gandiva-tiresias-style, muri-s, muri-l, muri-l-worst-ordering, muri-l-no-blossom, antman, gavel, gavel-packed, gavel-makespan, gavel-finish-time, gavel-fifo, gavel-allox, gavel-couples, horus, horus-plus, synergy-proportional, synergy-greedy, synergy-tune, synergy-opt, chronus, mps, mps-split, time-slicing, random-colocate, kernel-est, iadeep, iadeep-no-tuner, iadeep-no-predictor, mudi, mudi-priority, mudi-published, gslice-like, gpulets-like, muxflow-like, roommate
        "#]],
    );
}

#[test]
fn flags_are_checked() {
    let room = Room::with(&[("t.csv", GOOD)]);
    room.refuses("sim t.csv --cluster 8y8", expect![[r#"
        error: invalid value '8y8' for '--cluster <CLUSTER>': expected NODESxGPUS such as 8x8, found "8y8"

        For more information, try '--help'.
    "#]]);
    room.refuses_with(
        &["sim", "t.csv", "--cluster", ""],
        expect![[r#"
        error: invalid value '' for '--cluster <CLUSTER>': expected NODESxGPUS such as 8x8, found ""

        For more information, try '--help'.
    "#]],
    );
    room.refuses("sim t.csv --cluster 0x8", expect![[r#"
        error: invalid value '0x8' for '--cluster <CLUSTER>': expected NODESxGPUS such as 8x8, found "0x8"

        For more information, try '--help'.
    "#]]);
    room.refuses("sim t.csv --cluster 9999999x8", expect![[r#"
        error: invalid value '9999999x8' for '--cluster <CLUSTER>': 79999992 GPUs are more than the limit of 1000000

        For more information, try '--help'.
    "#]]);
    room.refuses(
        "sim t.csv --crash 1.5",
        expect![[r#"
            error: invalid value '1.5' for '--crash <P>': expected a number from 0 to 1

            For more information, try '--help'.
        "#]],
    );
    room.refuses(
        "sim t.csv --restart-cost -1",
        expect![[r#"
            error: invalid value '-1' for '--restart-cost <S>': expected a number from 0 to 1e9

            For more information, try '--help'.
        "#]],
    );
    room.refuses(
        "sim t.csv --restart-cost inf",
        expect![[r#"
            error: invalid value 'inf' for '--restart-cost <S>': expected a number from 0 to 1e9

            For more information, try '--help'.
        "#]],
    );
    room.refuses(
        "sim t.csv --node-mtbf 0",
        expect![[r#"
            error: invalid value '0' for '--node-mtbf <H>': expected a number above 0, at most 1e9

            For more information, try '--help'.
        "#]],
    );
    room.refuses(
        "sim t.csv --seed -1",
        expect![[r#"
            error: invalid value '-1' for '--seed <SEED>': invalid digit found in string

            For more information, try '--help'.
        "#]],
    );
    room.refuses(
        "sim t.csv --max-jobs 0",
        expect![[r#"
            error: invalid value '0' for '--max-jobs <N>': expected a whole number from 1 to 10000000

            For more information, try '--help'.
        "#]],
    );
    room.refuses(
        "compare t.csv -j 0",
        expect![[r#"
            error: invalid value '0' for '--jobs <N>': expected a whole number from 1 to 10000000

            For more information, try '--help'.
        "#]],
    );
    room.refuses("trace synth -n 99999999999", expect![[r#"
        error: invalid value '99999999999' for '--jobs <JOBS>': expected a whole number from 1 to 10000000

        For more information, try '--help'.
    "#]]);
    room.refuses(
        "trace synth --load -1",
        expect![[r#"
            error: cannot generate a trace: the load must be above 0 and at most 1000, not -1
        "#]],
    );
    room.refuses(
        "trace synth --load NaN",
        expect![[r#"
            error: cannot generate a trace: the load must be above 0 and at most 1000, not NaN
        "#]],
    );
    room.refuses("trace synth --mix coffee", expect![[r#"
        error: invalid value 'coffee' for '--mix <MIX>': unknown mix "coffee", expected one of small, philly, helios, pai, tiresias

        For more information, try '--help'.
    "#]]);
    room.refuses(
        "simulate t.csv",
        expect![[r#"
            error: unrecognized subcommand 'simulate'

              tip: some similar subcommands exist: 'submit', 'sim'

            Usage: roommate <COMMAND>

            For more information, try '--help'.
        "#]],
    );
}

#[test]
fn unwritable_outputs_are_refused_before_the_run() {
    let room = Room::with(&[("t.csv", GOOD), ("file", "old")]);
    std::fs::create_dir(room.path("folder")).unwrap();
    let _ = room.works("sim t.csv --journal j.jsonl");
    for to in ["folder", "folder/", "new/", "file/x", "/proc/nope/x"] {
        let before = room.everything();
        for line in [
            "sim t.csv --journal",
            "compare t.csv --report",
            "report j.jsonl -o",
            "trace convert t.csv -o",
            "trace synth -n 9 -o",
        ] {
            let outcome = room.run(&format!("{line} {to}"));
            assert_eq!((outcome.code, outcome.out.as_str()), (Some(2), ""), "{line} {to}");
            assert!(
                outcome.err.starts_with(&format!("error: could not write {to}")),
                "{}",
                outcome.err
            );
            assert!(outcome.err.lines().count() == 1, "{}", outcome.err);
        }
        assert!(room.everything() == before, "{to}");
    }
    room.refuses(
        "sim t.csv --journal folder",
        expect![[r#"
            error: could not write folder: it is a folder
        "#]],
    );
    room.refuses(
        "sim t.csv --journal new/",
        expect![[r#"
            error: could not write new/: it is the name of a folder
        "#]],
    );
    room.refuses(
        "sim t.csv --journal file/x",
        expect![[r#"
            error: could not write file/x: could not create folder file: File exists (os error 17)
        "#]],
    );
    let outcome = room.run("compare t.csv --journals file -p fifo");
    assert_eq!(outcome.code, Some(2));
}

#[test]
fn inputs_are_not_overwritten() {
    let room = Room::with(&[("t.csv", GOOD)]);
    let _ = room.works("sim t.csv --journal j.jsonl");
    room.refuses(
        "sim t.csv --journal t.csv",
        expect![[r#"
            error: could not write t.csv: it is an input file
            hint: give another output file
        "#]],
    );
    room.refuses(
        "compare t.csv --report ./t.csv",
        expect![[r#"
            error: could not write ./t.csv: it is an input file
            hint: give another output file
        "#]],
    );
    room.refuses(
        "report j.jsonl -o j.jsonl",
        expect![[r#"
            error: could not write j.jsonl: it is an input file
            hint: give another output file
        "#]],
    );
    // A conversion in place is allowed.
    let _ = room.works("trace convert t.csv -o t.csv");
    assert_eq!(room.text("t.csv"), GOOD);
}
