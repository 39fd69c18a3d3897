//! Rows of sacct by example, and properties over generated ones.

#![expect(clippy::needless_raw_string_hashes, reason = "expect-test writes its texts so")]

use super::super::{Format, ReadOptions, Remarks, Trace, TraceError, native, read as read_trace};
use super::*;
use expect_test::{Expect, expect};
use proptest::prelude::*;
use std::io::Write;

const HEAD: &str = "JobID|JobName|User|Account|Submit|Start|End|ElapsedRaw|State|NNodes|ReqTRES|\
    AllocTRES\n";

fn read_text(text: &str, skip_bad_rows: bool) -> Result<Trace, TraceError> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    read_trace(file.path(), &ReadOptions { skip_bad_rows, ..ReadOptions::default() })
}

/// The jobs in the project's own format, and the remarks.
fn check(rows: &str, expected: &Expect) {
    let text = match read_text(&format!("{HEAD}{rows}"), false) {
        Ok(trace) => {
            assert_eq!(trace.format, Format::Sacct);
            let mut text = Vec::new();
            native::write_csv(&mut text, &trace.jobs).unwrap();
            let told = trace.remarks.iter().map(|(remark, n)| remark.told(*n) + "\n");
            String::from_utf8(text).unwrap() + &told.collect::<String>()
        }
        Err(error) => error.problem.to_string() + "\n",
    };
    expected.assert_eq(&text);
}

#[test]
fn a_job_is_read_without_its_steps() {
    check(
        "17|train|ann|vision|2026-11-01T10:00:00|2026-11-01T10:05:00|2026-11-01T11:05:00|3600|\
         COMPLETED|2|billing=64,cpu=64,gres/gpu=8,mem=500G,node=2|\
         billing=64,cpu=64,gres/gpu:h100=8,gres/gpu=8,mem=500G,node=2\n\
         17.batch|batch||vision|2026-11-01T10:05:00|2026-11-01T10:05:00|2026-11-01T11:05:00|3600|\
         COMPLETED|1||cpu=32,gres/gpu:h100=4,gres/gpu=4,mem=250G,node=1\n\
         17.extern|extern||vision|2026-11-01T10:05:00|2026-11-01T10:05:00|2026-11-01T11:05:00|3600|\
         COMPLETED|2||cpu=64,gres/gpu:h100=8,gres/gpu=8,mem=500G,node=2\n",
        &expect![[r#"
            id,submit_s,gpus,duration_s,queue_s,attempts,cpu_milli,machines,model,team,user,status,kinds
            17,0,8,3600,300,1,8000,2,train,vision,ann,passed,h100
            left out 2 rows of steps, which belong to jobs
        "#]],
    );
}

#[test]
fn arrays_hets_requeues_and_reused_numbers() {
    check(
        // Tasks of an array, and those that still wait.
        "20_1|a|ann|v|2026-11-01T10:00:00|2026-11-01T10:00:10|Unknown|50|RUNNING|1|gres/gpu=1|gres/gpu=1\n\
         20_2|a|ann|v|2026-11-01T10:00:00|2026-11-01T10:00:20|2026-11-01T10:01:00|40|TIMEOUT|1|gres/gpu=1|gres/gpu=1\n\
         20_[3-9%4]|a|ann|v|2026-11-01T10:00:00|Unknown|Unknown|0|PENDING|1|gres/gpu=1|\n\
         30+0|h|bob|v|2026-11-01T10:02:00|2026-11-01T10:02:30|2026-11-01T10:03:30|60|COMPLETED|1|cpu=2|cpu=2\n\
         30+1|h|bob|v|2026-11-01T10:02:00|2026-11-01T10:02:30|2026-11-01T10:03:30|60|COMPLETED|2|gres/gpu=8|gres/gpu=8\n\
         40|r|bob|v|2026-11-01T10:03:00|2026-11-01T10:03:30|2026-11-01T10:05:10|100|NODE_FAIL|1|gres/gpu=2|gres/gpu=2\n\
         40|r|bob|v|2026-11-01T10:05:10|2026-11-01T10:06:00|2026-11-01T10:10:00|240|COMPLETED|1|gres/gpu=2|gres/gpu=2\n\
         50|x|bob|v|2026-11-01T10:03:00|2026-11-01T10:03:30|2026-11-01T10:03:40|10|FAILED|1|gres/gpu=1|gres/gpu=1\n\
         50|y|eve|w|2026-11-01T12:00:00|2026-11-01T12:00:30|2026-11-01T12:00:40|10|COMPLETED|1|gres/gpu=1|gres/gpu=1\n",
        &expect![[r#"
            id,submit_s,gpus,duration_s,queue_s,attempts,cpu_milli,machines,model,team,user,status
            20_1,0,1,50,10,1,,1,a,v,ann,
            20_2,0,1,40,20,1,,1,a,v,ann,failed
            30,120,8,60,30,1,250,3,h,v,bob,passed
            40,180,2,340,30,2,,1,r,v,bob,passed
            50,180,1,10,30,1,,1,x,v,bob,failed
            50@2,7200,1,10,30,1,,1,y,w,eve,passed
            left out 1 job that never started
            took 1 job as ended that still ran when the file was written
            joined 1 further attempt of jobs to their first
            named 1 job ID@N, because their number was used again
        "#]],
    );
}

#[test]
fn what_is_no_job_on_whole_gpus_is_counted() {
    check(
        "1|c|u|v|2026-11-01T10:00:00|2026-11-01T10:00:00|2026-11-01T10:01:00|60|COMPLETED|1|cpu=4|cpu=4\n\
         2|m|u|v|2026-11-01T10:00:00|2026-11-01T10:00:00|2026-11-01T10:01:00|60|COMPLETED|1|x=1|gres/gpu:a100_1g.5gb=1,gres/gpu=1\n\
         3|s|u|v|2026-11-01T10:00:00|2026-11-01T10:00:00|2026-11-01T10:01:00|60|COMPLETED|1|gres/shard=2|gres/shard=2\n\
         4|k|u|v|2026-11-01T10:00:00|None|2026-11-01T10:01:00|0|CANCELLED by 1000|1|gres/gpu=1|\n\
         5|k|u|v|2026-11-01T10:00:00|2026-11-01T10:01:00|2026-11-01T10:01:00|0|CANCELLED by 1000|1|gres/gpu=1|\n\
         6|g|u|v|2026-11-01T10:00:00|2026-11-01T10:00:00|2026-11-01T10:01:00|60|CANCELLED by 1000|1|gres/gpu=1|gres/gpu=1\n",
        &expect![[r#"
            id,submit_s,gpus,duration_s,queue_s,attempts,machines,model,team,user,status
            6,0,1,60,0,1,1,g,v,u,killed
            left out 1 job without a GPU
            left out 2 jobs on a part of a GPU (MIG, MPS, shard)
            left out 2 jobs that never started
        "#]],
    );
}

#[test]
fn a_bar_in_a_name_is_part_of_the_name() {
    check(
        "1|a|b, \"c\"|u|v|2026-11-01T10:00:00|2026-11-01T10:00:00|2026-11-01T10:01:00|60|COMPLETED|1|\
         gres/gpu=1|gres/gpu=1\n",
        &expect![[r#"
            id,submit_s,gpus,duration_s,queue_s,attempts,machines,model,team,user,status
            1,0,1,60,0,1,1,"a|b, ""c""",v,u,passed
        "#]],
    );
}

#[test]
fn other_columns_say_the_same() {
    let text = "JobID|State|Submit|Start|Elapsed|AllocTRES|\n\
        7|COMPLETED|1793527200|1793527260|1-00:00:05|gres/gpu:A100=2,gres/gpu:v100=1|\n\
        8|COMPLETED|1793527200|1793527200|02:03|gres/gpu=1|\n";
    let trace = read_text(text, false).unwrap();
    let found: Vec<(f64, Option<f64>, u32, usize)> = trace
        .jobs
        .iter()
        .map(|job| (job.duration_s, job.queue_s, job.gpus, job.gpu_models.len()))
        .collect();
    assert_eq!(found, [(86_405.0, Some(60.0), 3, 0), (123.0, Some(0.0), 1, 0)]);
}

#[test]
fn errors_name_the_column_and_what_was_expected() {
    for (row, column, expected) in [
        ("x|n|u|v|2026-11-01T10:00:00|Unknown|Unknown|0|PENDING|1||\n", "JobID", "a job id like"),
        ("1|n|u|v|yesterday|Unknown|Unknown|0|PENDING|1||\n", "Submit", "a time like"),
        ("1|n|u|v|2026-11-01T10:00:00|Unknown|Unknown|0|HAPPY|1||\n", "State", "a state of Slurm"),
        (
            "1|n|u|v|2026-11-01T10:00:00|Unknown|Unknown|0|PENDING|1|gres/gpu=many|\n",
            "ReqTRES",
            "a number",
        ),
        (
            "1|n|u|v|2026-11-01T10:00:00|Unknown|Unknown|-5|PENDING|1||\n",
            "ElapsedRaw",
            "at least 0",
        ),
    ] {
        let error = read_text(&format!("{HEAD}{row}"), false).unwrap_err();
        let found = (error.line, error.column, error.problem.to_string());
        assert_eq!((found.0, found.1), (Some(2), Some(column)), "{row}");
        assert!(found.2.contains(expected), "{}", found.2);
        let trace = read_text(&format!("{HEAD}{row}"), true).unwrap();
        assert_eq!((trace.jobs.len(), trace.dropped), (0, 1));
    }
    let error = read_text("JobID|Submit|Start|State|AllocTRES\n", false).unwrap_err();
    assert_eq!(error.problem.to_string(), "missing one of the columns ElapsedRaw, Elapsed, End");
}

/// A job as sacct would print it, with steps and attempts before its last.
#[derive(Clone, Debug)]
struct Printed {
    submit_s: u64,
    wait_s: u64,
    seconds: u64,
    gpus: u32,
    steps: usize,
    requeued: Vec<u64>,
    state: &'static str,
    name: String,
}

fn printed() -> impl Strategy<Value = Printed> {
    let state = prop::sample::select(vec!["COMPLETED", "FAILED", "TIMEOUT", "RUNNING"]);
    let name = "[a-z |,\"é]{1,12}".prop_filter("not blank", |name| !name.trim().is_empty());
    let gpus = prop_oneof![3 => 1u32..9, 1 => Just(0u32)];
    let requeued = prop::collection::vec(1u64..5_000, 0..3);
    (0u64..10_000_000, 0u64..9_000, 1u64..900_000, gpus, 0usize..4, requeued, state, name).prop_map(
        |(submit_s, wait_s, seconds, gpus, steps, requeued, state, name)| Printed {
            submit_s,
            wait_s,
            seconds,
            gpus,
            steps,
            requeued,
            state,
            name,
        },
    )
}

const BASE_S: u64 = 1_700_000_000;

fn rows_of(id: usize, job: &Printed) -> String {
    let Printed { submit_s, wait_s, seconds, gpus, name, state, .. } = job;
    let tres = format!("billing=1,cpu=4,gres/gpu={gpus},node=1");
    let row = |id: &str, submit: u64, start: u64, seconds: u64, state: &str| {
        let end = start + seconds;
        format!("{id}|{name}|u|v|{submit}|{start}|{end}|{seconds}|{state}|1|{tres}|{tres}\n")
    };
    let mut text = String::new();
    let (mut submit, mut start) = (BASE_S + submit_s, BASE_S + submit_s + wait_s);
    for lost in &job.requeued {
        text += &row(&id.to_string(), submit, start, *lost, "REQUEUED");
        submit = start + lost;
        start = submit + 60;
    }
    text += &row(&id.to_string(), submit, start, *seconds, state);
    for step in 0..job.steps {
        text += &row(&format!("{id}.{step}"), submit, start, *seconds, "COMPLETED");
    }
    text
}

proptest! {
    #[test]
    fn every_row_is_a_job_or_a_remark(jobs in prop::collection::vec(printed(), 1..20)) {
        let rows = jobs.iter().enumerate().map(|(i, job)| rows_of(i + 1, job));
        let trace = read_text(&(HEAD.to_owned() + &rows.collect::<String>()), false).unwrap();
        let with_gpus: Vec<(usize, &Printed)> =
            jobs.iter().enumerate().filter(|(_, job)| job.gpus > 0).collect();
        prop_assert_eq!(trace.jobs.len(), with_gpus.len());
        let first = with_gpus.iter().map(|(_, job)| job.submit_s).min().unwrap_or(0);
        for (i, job) in &with_gpus {
            let read = trace.jobs.iter().find(|read| read.id == (i + 1).to_string()).unwrap();
            let seconds = job.seconds + job.requeued.iter().sum::<u64>();
            prop_assert_eq!(read.submit_us, (job.submit_s - first) * 1_000_000);
            prop_assert_eq!(read.queue_s, Some(job.wait_s as f64));
            prop_assert_eq!((read.duration_s, read.gpus), (seconds as f64, job.gpus));
            prop_assert_eq!(read.model.as_deref(), Some(job.name.as_str()));
            prop_assert_eq!(read.attempts as usize, job.requeued.len() + 1);
        }
        let count = |of: &dyn Fn(&Printed) -> usize| jobs.iter().map(of).sum::<usize>() as u64;
        let expected: Remarks = [
            (Remark::NoGpu, count(&|job| usize::from(job.gpus == 0))),
            (Remark::Step, count(&|job| job.steps)),
            (Remark::StillRan, count(&|job| usize::from(job.gpus > 0 && job.state == "RUNNING"))),
            (Remark::Requeued, count(&|job| job.requeued.len())),
        ].into_iter().filter(|(_, n)| *n > 0).collect();
        prop_assert_eq!(&trace.remarks, &expected);
        // Written in the project's own format, it reads back as the same jobs.
        let mut csv = Vec::new();
        native::write_csv(&mut csv, &trace.jobs).unwrap();
        if !trace.jobs.is_empty() {
            let back = read_text(&String::from_utf8(csv).unwrap(), false).unwrap();
            prop_assert_eq!(back.jobs, trace.jobs);
        }
    }

    #[test]
    fn no_text_makes_the_reader_panic(rows in "([0-9a-zA-Z_.+\\[\\]:|=, é\"-]{0,80}\n){0,8}") {
        for skip_bad_rows in [false, true] {
            let found = read_text(&(HEAD.to_owned() + &rows), skip_bad_rows);
            prop_assert!(!skip_bad_rows || found.is_ok(), "{:?}", found);
        }
    }
}
