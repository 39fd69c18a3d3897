//! Every reader by example: small files in each format, and the errors of invalid ones.

#![expect(clippy::needless_raw_string_hashes, reason = "expect-test writes its texts so")]
#![expect(clippy::needless_pass_by_value, reason = "a table of examples reads better without &")]

use super::*;
use expect_test::{Expect, expect};
use flate2::Compression;
use flate2::write::GzEncoder;
use proptest::prelude::*;
use std::io::Write;

fn read_bytes(bytes: &[u8], options: &ReadOptions) -> Result<Trace, TraceError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.csv");
    std::fs::write(&path, bytes).unwrap();
    let mut result = read(&path, options);
    // The folder has a random name; messages are compared without it.
    let strip = |error: &mut TraceError| {
        error.path = error.path.file_name().map(Path::new).unwrap().into();
    };
    match &mut result {
        Ok(trace) => trace.first_dropped.iter_mut().for_each(strip),
        Err(error) => strip(error),
    }
    result
}

fn options(format: Format) -> ReadOptions {
    ReadOptions { format, ..ReadOptions::default() }
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut zip = GzEncoder::new(Vec::new(), Compression::default());
    zip.write_all(text).unwrap();
    zip.finish().unwrap()
}

/// Reads a trace and compares the jobs, or the error with its hint.
fn check(format: Format, text: impl AsRef<[u8]>, expected: Expect) {
    let text_or_error = match read_bytes(text.as_ref(), &options(format)) {
        Ok(trace) => format!("{}: {}", trace.format, shown(&trace)),
        Err(error) => match error.hint() {
            Some(hint) => format!("{error}\nhint: {hint}"),
            None => error.to_string(),
        },
    };
    expected.assert_eq(&text_or_error);
}

/// The jobs in Roommate's own format.
fn shown(trace: &Trace) -> String {
    let mut text = Vec::new();
    native::write_csv(&mut text, &trace.jobs).unwrap();
    String::from_utf8(text).unwrap()
}

const MURI: &str = "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,\
    iteration_time,resource_time_0,resource_time_1,resource_time_2,priority\n";

#[test]
fn gpus_max_is_at_least_gpus() {
    let of = |row: &str| {
        let text = format!("id,submit_s,gpus,duration_s,gpus_max,scaling\n{row}\n");
        let trace = read_bytes(text.as_bytes(), &options(Format::Roommate));
        trace.map(|t| (t.jobs[0].gpus_max, t.jobs[0].scaling))
    };
    assert_eq!(of("a,0,2,9,4,0.5").unwrap(), (Some(4), Some(0.5)));
    assert_eq!(of("a,0,2,9,,").unwrap(), (None, None));
    let less = of("a,0,2,9,1,").unwrap_err().to_string();
    assert!(less.contains("at least the 2 GPUs that it needs"), "{less}");
    assert!(of("a,0,2,9,4,3").is_err());
}

#[test]
fn muri_is_in_milliseconds_with_stages() {
    check(
        Format::Auto,
        format!(
            "{MURI}7,2,1500.5,100,net,32,51000.9,0,510,400,90,0.5,1\n3,1,0,10,net,8,90,0,9,1,2,3,0"
        ),
        expect![[r#"
            muri: id,submit_s,gpus,duration_s,steps,step_s,batch,stage_storage_s,stage_cpu_s,stage_gpu_s,stage_network_s,model,class
            3,0,1,0.09,10,0.009,8,0.001,0,0.002,0.003,net,
            7,1.5005,2,51,100,0.51,32,0.4,0,0.09,0.0005,net,best-effort
        "#]],
    );
}

#[test]
fn philly_tables_start_at_the_first_submission() {
    check(
        Format::Auto,
        "\u{feff}timestamp,duration,num_gpus,gpu_time,cluster\r\n\
         2017-10-02 00:00:10,60,8,480,vc1\r\n2017-10-01 23:59:50,5.5,1,5.5,vc2\r\n",
        expect![[r#"
            philly: id,submit_s,gpus,duration_s,team
            1,0,1,5.5,vc2
            0,20,8,60,vc1
        "#]],
    );
    check(
        Format::Auto,
        "job_id,submit_time,gpu_num,duration,in_completed_set\n\
         a,2017-09-24 14:41:35,1,176,1\nb,2017-09-24 14:41:36,2,9,0\n",
        expect![[r#"
            philly: id,submit_s,gpus,duration_s,status
            a,0,1,176,passed
            b,1,2,9,
        "#]],
    );
}

const LOG: &str = r#"[
 {"status": "Killed", "vc": "v", "jobid": "j1", "user": "u {[\"", "submitted_time": "2017-10-07 01:00:00",
  "attempts": [
   {"start_time": "2017-10-07 01:00:30", "end_time": "2017-10-07 01:01:30", "detail": [{"ip": "m1", "gpus": ["gpu0"]}]},
   {"start_time": null, "end_time": "None", "detail": null},
   {"start_time": "2017-10-07 02:00:00", "end_time": "2017-10-07 03:00:00",
    "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0", "gpu1"]}]}]},
 {"status": "Pass", "vc": "v", "jobid": "j2", "user": null, "submitted_time": "2017-10-07 01:00:02", "attempts": []}
]"#;

#[test]
fn the_philly_log_sums_attempts() {
    check(
        Format::Auto,
        LOG.replace(r#""attempts": []"#, r#""attempts": [{"detail": [{"gpus": ["g"]}]}]"#),
        expect![[r#"
            philly: id,submit_s,gpus,duration_s,queue_s,attempts,machines,team,user,status
            j1,0,4,3660,30,3,2,v,"u {[""",killed
            j2,2,1,0,,1,,v,,passed
        "#]],
    );
    check(
        Format::Auto,
        LOG,
        expect![[r#"
            could not read trace "t.csv": line 8, column "detail": expected 1 to 65535 GPUs in the last attempt, found "0"
            hint: pass --skip-bad-rows to drop such rows and count them"#]],
    );
    check(
        Format::Philly,
        LOG.replace("\"vc\": \"v\", \"jobid\": \"j2\"", "\"jobid\": 3"),
        expect![[r#"
            could not read trace "t.csv": line 8: broken job: invalid type: integer `3`, expected a string, at character 29
            hint: pass --skip-bad-rows to drop such rows and count them"#]],
    );
    check(
        Format::Philly,
        &LOG[..LOG.len() - 10],
        expect![[
            r#"could not read trace "t.csv": line 8: broken JSON: the file ends inside the array of jobs"#
        ]],
    );
    check(
        Format::Philly,
        LOG.replace("},\n {", "}\n {"),
        expect![[
            r#"could not read trace "t.csv": line 8: broken JSON: expected a comma or the end of the array, found '{'"#
        ]],
    );
    check(
        Format::Philly,
        format!("[\n{{\"a\": \"{}\"}}]", "x".repeat(5 << 20)),
        expect![[
            r#"could not read trace "t.csv": line 2: the JSON object is longer than 4096 KiB"#
        ]],
    );
}

#[test]
fn helios_leaves_out_jobs_without_gpus() {
    let text = "job_id,user,vc,jobname,gpu_num,cpu_num,node_num,state,submit_time,start_time,\
                end_time,duration,queue\n\
        1,u1,vcA,\"a,b\",8,32,1,COMPLETED,2020-04-01 00:00:00,x,x,100,5\n\
        2,u1,vcA,c,0,4,1,FAILED,2020-04-01 00:00:01,x,x,100,5\n\
        3,u2,vcB,c,1,4,1,NODE_FAIL,2020-04-01 00:00:02,None,None,7,0\n";
    check(
        Format::Auto,
        text,
        expect![[r#"
            helios: id,submit_s,gpus,duration_s,queue_s,cpu_milli,team,user,status
            1,0,8,100,5,4000,vcA,u1,passed
            3,2,1,7,0,4000,vcB,u2,failed
        "#]],
    );
    let trace = read_bytes(text.as_bytes(), &ReadOptions::default()).unwrap();
    assert_eq!((trace.count(Remark::NoGpu), trace.dropped), (1, 0));
    assert_eq!(trace.origin_s, Some(1_585_699_200));
    check(
        Format::Auto,
        "job_id,submit_time,gpu_num,duration,duration_capped\n9,2020-04-01 00:00:00,2,172800,1\n",
        expect![[r#"
            helios: id,submit_s,gpus,duration_s
            9,0,2,172800
        "#]],
    );
}

#[test]
fn pai_tasks_share_gpus() {
    check(
        Format::Auto,
        "j1,worker,3,Terminated,100,160,600,29.3,50,T4\n\
         j1,ps,1,Terminated,100,160,600,29.3,,CPU\n\
         j1,worker,1,Failed,90,91.5,600,29.3,25,\n",
        expect![[r#"
            pai: id,submit_s,gpus,duration_s,cpu_milli,gpu_milli,status,kinds
            j1/worker#2,90,1,1.5,6000,250,failed,
            j1/worker,100,2,60,9000,750,passed,T4
        "#]],
    );
    check(
        Format::Auto,
        "job_name,task_name,start_time,duration,duration_capped,gpus_ceil\n\
         a,w,5,10,0,2\na,w,6,10,0,2\n",
        expect![[r#"
            pai: id,submit_s,gpus,duration_s
            a/w,5,2,10
            a/w#2,6,2,10
        "#]],
    );
}

#[test]
fn chronus_keeps_the_last_deadline() {
    check(
        Format::Auto,
        "job_id,user,num_gpu,submit_time,iterations,model_name,duration,interval,\
         expect_time_list,expect_value_list,best_effort,job_type\n\
         0,vcX,1,10,5,net,2,5,3-4-6,10-8-5,0,soft\n1,vcX,1,2,5,net,2,5,3,10,0,strict\n\
         2,vcY,4,2,5,net,2,5,2,10,1,best\n",
        expect![[r#"
            chronus: id,submit_s,gpus,duration_s,deadline_s,value,model,team,class,soft_deadlines
            1,120,1,120,300,10,net,vcX,,
            2,120,4,120,,,net,vcY,best-effort,
            0,600,1,120,960,5,net,vcX,,780:10|840:8
        "#]],
    );
}

#[test]
fn tiresias_and_elasticflow_are_in_seconds() {
    check(
        Format::Auto,
        "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n\
         0,1,0,606,net,164,30\n",
        expect![[r#"
            tiresias: id,submit_s,gpus,duration_s,model
            0,0,1,164,net
        "#]],
    );
    check(
        Format::Auto,
        "job_id,submit_time,real_iteration,model_name,ddl,batch_size,num_gpu,real_duration,\
         duration,iteration\n\
         0,5,9,net,300,64,2,100,100,9\n",
        expect![[r#"
            elasticflow: id,submit_s,gpus,duration_s,batch,deadline_s,model
            0,5,2,100,64,300,net
        "#]],
    );
}

/// Reads Gavel jobs with a throughput table; the jobs as text, or the error.
fn gavel(text: &str, table: &str, kind: &str) -> String {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(table.as_bytes()).unwrap();
    let throughputs = Some(file.path().to_owned());
    let options = ReadOptions { throughputs, gpu_model: kind.to_owned(), ..ReadOptions::default() };
    match read_bytes(text.as_bytes(), &options) {
        Ok(trace) => shown(&trace),
        Err(error) => format!("{error}\nhint: {}", error.hint().unwrap_or_default())
            .replace(&format!("{:?}", error.path), "FILE"),
    }
}

#[test]
fn gavel_needs_throughputs() {
    let table = "gpu,unconsolidated,job_type,scale_factor,steps_per_s\n\
        v100,0,Net (batch size 16),2,4\nv100,1,Net (batch size 16),2,1\n\
        k80,0,Net (batch size 16),2,0.5\n";
    let pairs = "gpu,scale_factor,job_type,other_job_type,steps_per_s,other_steps_per_s\n\
        v100,2,Net (batch size 16),Other,1,1\nv100,2,Net (batch size 16),,8,\n";
    let csv = "job_id,job_type,total_steps,scale_factor,priority_weight,arrival_s\n\
        5,Net (batch size 16),100.5,2,5,2.5\n";
    let trace = "Net (batch size 16)\tpython x \"%s\"\t-n\t1\t100\t6.000000\t2\n";
    let wide = "Net (batch size 16)\tcmd\tdir\t-n\t1\t100\t2\tgns\t1\t-1.000000\t30\t4\n\
        Net (batch size 16)\tcmd\tdir\t-n\t1\t100\t2\tstatic\t1\t2.0\t30\t6\n";
    check(
        Format::Auto,
        csv,
        expect![[r#"
            could not read trace "t.csv": the jobs have step counts but no durations, and no throughput table was given
            hint: pass --throughputs with a CSV of columns gpu, job_type, scale_factor, steps_per_s"#]],
    );
    expect![[r#"
        id,submit_s,gpus,duration_s,steps,step_s,batch,weight,model
        5,2.5,2,25.125,100.5,0.25,16,5,Net (batch size 16)
    "#]]
    .assert_eq(&gavel(csv, table, "v100"));
    expect![[r#"
        id,submit_s,gpus,duration_s,steps,step_s,batch,model
        0,6,2,12.5,100,0.125,16,Net (batch size 16)
    "#]]
    .assert_eq(&gavel(trace, pairs, "v100"));
    expect![[r#"
        id,submit_s,gpus,duration_s,steps,step_s,batch,deadline_s,model
        0,4,2,30,100,2,16,,Net (batch size 16)
        1,6,2,30,100,2,16,66,Net (batch size 16)
    "#]]
    .assert_eq(&gavel(wide, table, "k80"));
    expect![[r#"
        could not read throughput table FILE: no throughputs for GPU model "a100"; the table has k80, v100
        hint: pass --gpu-model with one of these"#]]
    .assert_eq(&gavel(csv, table, "a100"));
    expect![[r#"
        could not read trace FILE: line 2, column "job_type": no throughput for "Net (batch size 16)" on 1 GPUs of model "v100"
        hint: pass a table that has it, or --skip-bad-rows to drop such rows and count them"#]]
    .assert_eq(&gavel(&csv.replace(",2,5", ",1,5"), table, "v100"));
}

#[test]
fn errors_say_where_and_what() {
    let native = |rows: &str| format!("id,submit_s,gpus,duration_s\n{rows}\n");
    check(Format::Auto, "", expect![[r#"could not read trace "t.csv": the file is empty"#]]);
    check(Format::Muri, " \n\n", expect![[r#"could not read trace "t.csv": the file is empty"#]]);
    check(
        Format::Auto,
        "a,b\n1,2\n",
        expect![[r#"
            could not read trace "t.csv": unknown trace format, first line "a,b"
            hint: pass --format with one of roommate, philly, helios, pai, muri, gavel, chronus, tiresias, elasticflow, synergy, sacct, kube; the columns of the roommate format are id, submit_s, gpus, duration_s"#]],
    );
    check(
        Format::Roommate,
        "id,submit,gpus\n",
        expect![[r#"
            could not read trace "t.csv": line 1: missing columns "submit_s", "duration_s"; expected id, submit_s, gpus, duration_s, found id, submit, gpus
            hint: pass --format with one of roommate, philly, helios, pai, muri, gavel, chronus, tiresias, elasticflow, synergy, sacct, kube; the columns of the roommate format are id, submit_s, gpus, duration_s"#]],
    );
    for (rows, expected) in [
        ("a,0,1,1\n\nb,1,-,1", r#"line 4, column "gpus": expected a number, found "-""#),
        ("a,0,1", "line 2: expected 4 fields, found 3"),
        ("a,0,1,1,9", "line 2: expected 4 fields, found 5"),
        ("a,-1,1,1", r#"line 2, column "submit_s": expected a number of at least 0, found "-1""#),
        ("a,0,1,NaN", r#"line 2, column "duration_s": expected a finite number, found "NaN""#),
        ("a,0,1,1e400", r#"line 2, column "duration_s": expected a finite number, found "inf""#),
        ("a,0,0,1", r#"line 2, column "gpus": expected at least 1 GPU, found "0""#),
        ("a,0,70000,1", r#"line 2, column "gpus": expected at most 65535, found "70000""#),
        ("a,0,1.5,1", r#"line 2, column "gpus": expected a whole number, found "1.5""#),
        (
            "a,4e9,1,1",
            r#"line 2, column "submit_s": expected at most 100 years, found "4000000000""#,
        ),
        (",0,1,1", r#"line 2: expected a job id, found """#),
        ("a,0,1,1\na,0,1,1", r#"line 3: duplicate job id "a""#),
        ("\"a,0,1,1", "line 2: a quoted field is not closed on its line"),
        ("\"a\"b,0,1,1", "line 2: unexpected text after a closing quote"),
    ] {
        let error = read_bytes(native(rows).as_bytes(), &ReadOptions::default()).unwrap_err();
        assert_eq!(error.to_string(), format!("could not read trace \"t.csv\": {expected}"));
        let hint = error.hint().unwrap();
        assert_eq!(hint, "pass --skip-bad-rows to drop such rows and count them");
    }
    check(
        Format::Auto,
        b"id,submit_s,gpus,duration_s\n\xff,0,1,1\n",
        expect![[r#"
            could not read trace "t.csv": line 2: not valid UTF-8
            hint: pass --skip-bad-rows to drop such rows and count them"#]],
    );
    check(
        Format::Helios,
        "job_id,submit_time,gpu_num,duration\n1,yesterday,1,1\n",
        expect![[r#"
            could not read trace "t.csv": line 2, column "submit_time": expected a time like 2020-04-01 12:30:00 (1970 to 2069), found "yesterday"
            hint: pass --skip-bad-rows to drop such rows and count them"#]],
    );
    check(
        Format::Auto,
        "{\"id\": \"a\", \"submit_s\": 0, \"duration_s\": 1}",
        expect![[r#"
            could not read trace "t.csv": line 1: broken job: missing field `gpus`, at character 43
            hint: pass --skip-bad-rows to drop such rows and count them"#]],
    );
    let missing = read(Path::new("no/such.csv"), &ReadOptions::default()).unwrap_err();
    assert_eq!(missing.to_string(), "could not read trace \"no/such.csv\": no such file");
    assert_eq!(missing.hint(), None);
}

#[test]
fn bad_rows_can_be_dropped_but_not_broken_files() {
    let skip = ReadOptions { skip_bad_rows: true, ..ReadOptions::default() };
    let mut text = "id,submit_s,gpus,duration_s\ngood,1,1,1\n".to_owned();
    text.push_str(&"bad,0,-,1\n".repeat(9));
    let trace = read_bytes(text.as_bytes(), &skip).unwrap();
    assert_eq!((trace.jobs.len(), trace.dropped, trace.first_dropped.len()), (1, 9, 5));
    assert_eq!(trace.first_dropped[1].line, Some(4));
    let log = read_bytes(LOG.as_bytes(), &skip).unwrap();
    assert_eq!((log.jobs.len(), log.dropped), (1, 1));
    assert!(read_bytes(b"id,submit_s\n", &skip).is_err());
    let few = ReadOptions { max_jobs: Some(1), ..ReadOptions::default() };
    assert_eq!(read_bytes(text.as_bytes(), &few).unwrap().jobs.len(), 1);
}

#[test]
fn gzip_is_detected_from_content() {
    let head = b"id,submit_s,gpus,duration_s\n";
    let rows: Vec<String> = (0..5000).map(|i| format!("job{i},{},1,{}\n", i * 7, i * 13)).collect();
    let rows = rows.concat();
    let mut members = gzip(head);
    members.extend(gzip(rows.as_bytes()));
    let trace = read_bytes(&members, &ReadOptions::default()).unwrap();
    assert_eq!(trace.jobs.len(), 5000);
    let skip = ReadOptions { skip_bad_rows: true, ..ReadOptions::default() };
    let cut = read_bytes(&members[..members.len() - 5000], &skip).unwrap_err();
    assert!(cut.line.is_some_and(|line| (100..5000).contains(&line)), "{cut}");
    assert_eq!(cut.problem, Problem::Truncated);
    let mut broken = gzip(&[head, rows.as_bytes()].concat());
    let middle = broken.len() / 2;
    broken[middle..].fill(0xff);
    let error = read_bytes(&broken, &skip).unwrap_err();
    assert!(matches!(error.problem, Problem::Gzip(_) | Problem::Truncated), "{error}");
}

#[test]
fn an_overlong_line_is_refused_early() {
    let mut text = b"id,submit_s,gpus,duration_s\na,0,1,1\n".to_vec();
    text.resize(text.len() + 10_000_000, b'x');
    let zipped = gzip(&text);
    for bytes in [text, zipped] {
        check(
            Format::Auto,
            bytes,
            expect![[r#"could not read trace "t.csv": line 3: the line is longer than 1024 KiB"#]],
        );
    }
}

#[test]
fn formats_have_names() {
    for format in Format::ALL {
        assert_eq!(format.name().parse(), Ok(*format));
    }
    let error = "muri2".parse::<Format>().unwrap_err().to_string();
    assert!(error.starts_with("unknown trace format \"muri2\", expected one of auto, "), "{error}");
}

/// Fragments of all formats, so that random files get past the first checks.
fn pieces() -> impl Strategy<Value = Vec<u8>> {
    let known = prop::sample::select(vec![
        MURI,
        "id,submit_s,gpus,duration_s,soft_deadlines,kinds\n",
        "timestamp,duration,num_gpus\n",
        "job_id,submit_time,gpu_num,duration,state,queue\n",
        "job_id,user,num_gpu,submit_time,duration,expect_time_list,expect_value_list,job_type\n",
        "job_name,task_name,inst_num,status,start_time,end_time,plan_gpu\n",
        "2017-10-07 01:00:00,",
        "a,1,2,3\n",
        "1,1,1,1,1,1,1,1,1,1,1,1,1\n",
        "[{\"status\":\"Pass\",\"jobid\":\"a\",\"attempts\":[",
        "{\"id\":\"a\",\"submit_s\":1e300,\"gpus\":1,\"duration_s\":1}\n",
        "\"",
        ",",
        "\n",
        "\t",
        "]",
        "}",
        "-1",
        "1e308",
        "Terminated",
        "strict",
        "5-4",
        "\u{feff}",
    ]);
    let piece = prop_oneof![
        3 => known.prop_map(|text| text.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..20),
    ];
    prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_input_makes_a_reader_panic(
        bytes in pieces(), zipped in any::<bool>(), skip in any::<bool>(), cut in 0usize..40,
    ) {
        let mut bytes = if zipped { gzip(&bytes) } else { bytes };
        bytes.truncate(bytes.len().saturating_sub(if zipped { cut / 8 } else { 0 }));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t");
        std::fs::write(&path, &bytes).unwrap();
        for format in Format::ALL {
            let options = ReadOptions {
                skip_bad_rows: skip, throughputs: Some(path.clone()), ..options(*format)
            };
            match read(&path, &options) {
                Ok(trace) => {
                    prop_assert!(trace.jobs.is_sorted_by_key(|job| job.submit_us));
                    prop_assert!(trace.jobs.iter().all(|job| job.gpus > 0 && job.work_s() >= 0.0));
                    let _ = stats::stats(&trace, Some(8)).to_string();
                }
                Err(error) => prop_assert!(!error.to_string().is_empty()),
            }
        }
    }
}
