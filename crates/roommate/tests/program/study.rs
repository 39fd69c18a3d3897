//! `roommate trace study`: its tables, its errors and its files.

use crate::{GOOD, Room};
use expect_test::expect;

/// Two teams, two delays: team x has a quota of two GPUs and uses one of them until 600.
const WAITS: &str = "id,submit_s,gpus,duration_s,team,queue_s,machines,gpu_util,status,attempts,\
    failure\n\
    a,0,1,600,x,0,1,0.5,passed,1,\n\
    b,0,1,400,y,0,1,0.4,killed,1,\n\
    c,100,2,200,x,500,1,0.9,passed,2,\n\
    d,100,4,300,y,120,2,0.7,failed,3,\"inputs, wrong\"\n";

#[test]
fn a_study_fills_the_tables_that_the_trace_supports() {
    let room = Room::with(&[("t.csv", WAITS)]);
    expect![[r#"
        4 jobs, 1 GPU-hours, roommate trace

        Run time by job size
          GPUs  jobs  of jobs  of GPU time      p50      p90      p95     mean
          1        2   50.0 %       38.5 %  6.7 min   10 min   10 min  8.3 min
          2-4      2   50.0 %       61.5 %  3.3 min  5.0 min  5.0 min  4.2 min
          all      4  100.0 %      100.0 %  5.0 min   10 min   10 min  6.2 min

        Job sizes
          GPUs  jobs  of jobs  of GPU time
          1        2   50.0 %       38.5 %
          2        1   25.0 %       15.4 %
          4        1   25.0 %       46.2 %
          all      4  100.0 %      100.0 %

        Virtual clusters
          team  jobs  of jobs  of GPU time  run p50
          y        2   50.0 %       61.5 %  5.0 min
          x        2   50.0 %       38.5 %  3.3 min
          all      4  100.0 %      100.0 %  5.0 min

        Queueing delay by job size
          GPUs  jobs      p50      p90      p95     mean  over 1 min  over 10 min
          1        2      0 s      0 s      0 s      0 s       0.0 %        0.0 %
          2-4      2  2.0 min  8.3 min  8.3 min  5.2 min     100.0 %        0.0 %
          all      4      0 s  8.3 min  8.3 min  2.6 min      50.0 %        0.0 %

        Queueing delay by virtual cluster
          team  jobs  p50      p90      p95     mean  over 1 min  over 10 min
          y        2  0 s  2.0 min  2.0 min  1.0 min      50.0 %        0.0 %
          x        2  0 s  8.3 min  8.3 min  4.2 min      50.0 %        0.0 %
          all      4  0 s  8.3 min  8.3 min  2.6 min      50.0 %        0.0 %

        Causes of delay by job size
          GPUs  delayed jobs  fair share  fragmentation  of time: fair share  fragmentation
          1                0           -              -                    -              -
          2-4              2      50.0 %         50.0 %               80.6 %         19.4 %
          all              2      50.0 %         50.0 %               80.6 %         19.4 %

        Causes of delay by virtual cluster
          team  delayed jobs  fair share  fragmentation  of time: fair share  fragmentation
          y                1       0.0 %        100.0 %                0.0 %        100.0 %
          x                1     100.0 %          0.0 %              100.0 %          0.0 %
          all              2      50.0 %         50.0 %               80.6 %         19.4 %

        Queueing delay by machines that a job was spread over
          GPUs on machines  jobs      p50      p90      p95     mean  over 1 min  over 10 min
          2-4 on 1             1  8.3 min  8.3 min  8.3 min  8.3 min     100.0 %        0.0 %
          2-4 on 2             1  2.0 min  2.0 min  2.0 min  2.0 min     100.0 %        0.0 %

        Utilisation of GPUs by job size and outcome, weighted by GPU time
          GPUs  jobs  passed  killed  unsuccessful     all
          1        2  50.0 %  40.0 %             -  46.0 %
          2        1  90.0 %       -             -  90.0 %
          4        1       -       -        70.0 %  70.0 %
          all      4  66.0 %  40.0 %        70.0 %  63.8 %

        Utilisation of GPUs by machines that a job was spread over
          GPUs on machines  jobs    mean     p50     p90     p95
          2 on 1               1  90.0 %  90.0 %  90.0 %  90.0 %
          4 on 2               1  70.0 %  70.0 %  70.0 %  70.0 %

        Outcome of jobs
          outcome       jobs  of jobs  of GPU time  run p50  attempts  retried
          passed           2   50.0 %       38.5 %  3.3 min      1.50   50.0 %
          killed           1   25.0 %       15.4 %  6.7 min      1.00    0.0 %
          unsuccessful     1   25.0 %       46.2 %  5.0 min      3.00  100.0 %
          all              4  100.0 %      100.0 %  5.0 min      1.75   50.0 %

        Outcome and retries by job size
          GPUs  jobs   passed  killed  unsuccessful  unknown  attempts  retried
          1        2   50.0 %  50.0 %         0.0 %    0.0 %      1.00    0.0 %
          2        1  100.0 %   0.0 %         0.0 %    0.0 %      2.00  100.0 %
          4        1    0.0 %   0.0 %       100.0 %    0.0 %      3.00  100.0 %
          all      4   50.0 %  25.0 %        25.0 %    0.0 %      1.75   50.0 %

        Attempts
          attempts  jobs  of jobs  of GPU time   passed  killed  unsuccessful
          1            2   50.0 %       38.5 %   50.0 %  50.0 %         0.0 %
          2            1   25.0 %       15.4 %  100.0 %   0.0 %         0.0 %
          3            1   25.0 %       46.2 %    0.0 %   0.0 %       100.0 %
          all          4  100.0 %      100.0 %   50.0 %  25.0 %        25.0 %

        Reasons of failures, time to failure as the mean of a job's attempts
          reason         trials  jobs  users      p50      p90      p95  of GPU time
          inputs, wrong       3     1      -  1.7 min  1.7 min  1.7 min      100.0 %
          all                 3     1      -  1.7 min  1.7 min  1.7 min      100.0 %
          without 3 jobs that lack a value
    "#]]
    .assert_eq(&room.works("trace study t.csv --quota x=2,y=8"));
    let study = room.json("trace study t.csv --quota x=2 --quota y=8");
    let tables = study["tables"].as_array().unwrap();
    let causes = tables.iter().find(|t| t["id"] == "causes_by_team").unwrap();
    assert_eq!(causes["rows"][0]["team"], "y");
    assert_eq!(
        (&causes["rows"][0]["fragmentation"], &causes["rows"][1]["fair_share"]),
        (&1.0.into(), &1.0.into())
    );
    let csv = room.works("trace study t.csv -o csv");
    assert!(csv.starts_with("table,row,column,value\nrun_time,1,jobs,2\n"), "{csv}");
    assert!(csv.contains("causes_by_size,,missing,fair_share_s (or team and --quota)\n"), "{csv}");
    assert!(csv.contains("failures,\"inputs, wrong\",trials,3\n"), "{csv}");
    // Conversion to JSON lines loses nothing.
    let _ = room.works("trace convert t.csv -o t.jsonl");
    assert_eq!(room.works("trace study t.jsonl -o csv"), csv);
}

#[test]
fn a_study_lists_missing_columns() {
    let room = Room::with(&[("t.csv", GOOD)]);
    expect![[r#"
        3 jobs, 0 GPU-hours, roommate trace

        Run time by job size
          GPUs  jobs  of jobs  of GPU time   p50      p90      p95     mean
          1        2   66.7 %       56.5 %  30 s  1.7 min  1.7 min  1.1 min
          2-4      1   33.3 %       43.5 %  50 s     50 s     50 s     50 s
          all      3  100.0 %      100.0 %  50 s  1.7 min  1.7 min  1.0 min

        Job sizes
          GPUs  jobs  of jobs  of GPU time
          1        2   66.7 %       56.5 %
          2        1   33.3 %       43.5 %
          all      3  100.0 %      100.0 %

        Virtual clusters
          not answered: the trace has no team

        Queueing delay by job size
          not answered: the trace has no queue_s

        Queueing delay by virtual cluster
          not answered: the trace has no queue_s, team

        Causes of delay by job size
          not answered: the trace has no queue_s, fair_share_s (or team and --quota)

        Causes of delay by virtual cluster
          not answered: the trace has no queue_s, fair_share_s (or team and --quota), team

        Queueing delay by machines that a job was spread over
          not answered: the trace has no queue_s, machines

        Utilisation of GPUs by job size and outcome, weighted by GPU time
          not answered: the trace has no gpu_util, status

        Utilisation of GPUs by machines that a job was spread over
          not answered: the trace has no gpu_util, machines

        Outcome of jobs
          not answered: the trace has no status

        Outcome and retries by job size
          not answered: the trace has no status

        Attempts
          not answered: the trace has no attempts, status

        Reasons of failures, time to failure as the mean of a job's attempts
          not answered: the trace has no failure
    "#]]
    .assert_eq(&room.works("trace study t.csv"));
}

#[test]
fn a_report_of_a_study_is_written_atomically() {
    let room = Room::with(&[("t.csv", WAITS)]);
    let outcome = room.run("trace study t.csv --report out/page.html -o csv");
    assert_eq!((outcome.code, outcome.err.as_str()), (Some(0), "report: out/page.html\n"));
    let page = room.text("out/page.html");
    assert!(
        page.contains("fig-wait") && page.contains("Made by <code>roommate trace study</code>")
    );
    room.refuses(
        "trace study t.csv --report t.csv",
        expect![[r#"
        error: could not write t.csv: it is an input file
        hint: give another output file
    "#]],
    );
    room.refuses(
        "trace study t.csv --report out",
        expect![[r#"
        error: could not write out: it is a folder
    "#]],
    );
}

#[test]
fn quotas_are_checked() {
    let room = Room::with(&[("t.csv", WAITS), ("good.csv", GOOD)]);
    room.refuses("trace study t.csv --quota x", expect![[r#"
        error: invalid value 'x' for '--quota <TEAM=GPUS,...>': expected a team and its GPUs, like vision=64

        For more information, try '--help'.
    "#]]);
    room.refuses(
        "trace study t.csv --quota x=2,z=4",
        expect![[r#"
        error: --quota: the trace has no team "z"
        hint: its teams are x, y
    "#]],
    );
    room.refuses(
        "trace study good.csv --quota x=2",
        expect![[r#"
        error: --quota: the trace has no team "x"
        hint: no job of the trace has a team
    "#]],
    );
}

#[test]
fn recorded_columns_are_checked() {
    let head = "id,submit_s,gpus,duration_s,queue_s,fair_share_s,gpu_util\n";
    let room = Room::with(&[]);
    room.put("t.csv", format!("{head}a,0,1,9,5,6,0.5\n"));
    room.refuses("trace study t.csv", expect![[r#"
        error: could not read trace "t.csv": line 2, column "fair_share_s": expected a part of queue_s, found "6"
        hint: pass --skip-bad-rows to drop such rows and count them
    "#]]);
    room.put("t.csv", format!("{head}a,0,1,9,5,5,52\n"));
    room.refuses("trace study t.csv", expect![[r#"
        error: could not read trace "t.csv": line 2, column "gpu_util": expected a share from 0 to 1, found "52"
        hint: pass --skip-bad-rows to drop such rows and count them
    "#]]);
}

#[test]
fn parameters_of_the_study_s_guidelines_are_checked() {
    let room = Room::with(&[("t.csv", GOOD)]);
    room.refuses(
        "sim t.csv -p fifo --set patience_s=-1",
        expect![[r#"
        error: --set "patience_s=-1": policy "fifo": patience_s: expected a number of at least 0
        hint: `roommate policies fifo` lists its parameters
    "#]],
    );
    room.refuses(
        "sim t.csv -p srtf --set patience_s=9 --set repack=true",
        expect![[r#"
        error: policy "srtf": patience_s: cannot be combined with repack
        hint: `roommate policies srtf` lists its parameters
    "#]],
    );
    room.refuses(
        "sim t.csv -p tiresias --set dedicate_from=0",
        expect![[r#"
        error: --set "dedicate_from=0": policy "tiresias": dedicate_from: expected at least 1 GPU
        hint: `roommate policies tiresias` lists its parameters
    "#]],
    );
    let failures = |flags: &str| {
        let sim = format!("sim --cluster 2x4 -p fifo-backfill --crash 0.4 --user-errors 1 {flags}");
        let result = room.json(&sim);
        (result["failures"].as_u64().unwrap(), result["finished"].as_u64().unwrap())
    };
    let (blind, careful) = (failures(""), failures("--user-retries 0"));
    assert_eq!((blind.0, blind.1), (4 * careful.0, careful.1));
}
