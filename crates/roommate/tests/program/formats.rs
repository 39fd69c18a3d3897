//! Every trace format by a small sample that runs; and Roommate's own, written and read back.

use crate::{GOOD, Room, gzip};
use expect_test::expect;

const SAMPLES: &[(&str, &str)] = &[
    ("roommate", GOOD),
    (
        "roommate",
        "{\"id\":\"a\",\"submit_s\":0,\"gpus\":1,\"duration_s\":9}\n\
         {\"id\":\"b\",\"submit_s\":1.5,\"gpus\":2,\"duration_s\":9,\"team\":\"t\"}\n",
    ),
    (
        "philly",
        "timestamp,duration,num_gpus,gpu_time,cluster\n\
         2017-10-02 00:00:10,60,2,120,vc1\n2017-10-01 23:59:50,5.5,1,5.5,vc2\n",
    ),
    (
        "philly",
        r#"[{"status": "Pass", "vc": "v", "jobid": "j", "user": "u", "submitted_time": "2017-10-07 01:00:00",
            "attempts": [{"start_time": "2017-10-07 01:00:30", "end_time": "2017-10-07 01:01:30",
            "detail": [{"ip": "m1", "gpus": ["gpu0"]}]}]}]"#,
    ),
    (
        "helios",
        "job_id,user,vc,gpu_num,cpu_num,state,submit_time,duration,queue\n\
         1,u1,vcA,2,8,COMPLETED,2020-04-01 00:00:00,100,5\n2,u1,vcA,0,4,FAILED,2020-04-01 00:00:01,9,5\n",
    ),
    (
        "pai",
        "j1,worker,3,Terminated,100,160,600,29.3,50,\nj1,ps,1,Terminated,100,160,600,29.3,,CPU\n",
    ),
    ("pai", "job_name,task_name,start_time,duration,gpus_ceil\na,w,5,10,2\na,w,6,10,2\n"),
    (
        "muri",
        "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,iteration_time,\
         resource_time_0,resource_time_1,resource_time_2,priority\n\
         7,2,1500,100,net,32,51000,510,400,90,20,0\n3,1,0,10,net,8,90,9,1,2,3,1\n",
    ),
    (
        "gavel",
        "job_id,job_type,total_steps,scale_factor,arrival_s\n5,Net (batch size 16),100,2,2.5\n",
    ),
    ("gavel", "Net (batch size 16)\tpython x\t-n\t1\t100\t6.0\t2\n"),
    (
        "chronus",
        "job_id,user,num_gpu,submit_time,iterations,model_name,duration,interval,expect_time_list,\
         expect_value_list,best_effort,job_type\n0,vcX,1,10,5,net,2,5,3-4,10-8,0,soft\n",
    ),
    ("tiresias", "job_id,num_gpu,submit_time,iterations,model_name,duration\n0,1,0,606,net,164\n"),
    (
        "elasticflow",
        "job_id,submit_time,model_name,ddl,batch_size,num_gpu,duration\n0,5,net,300,64,2,100\n",
    ),
];

const THROUGHPUTS: &str = "gpu,job_type,scale_factor,steps_per_s\nv100,Net (batch size 16),2,4\n";

#[test]
fn every_format_runs_by_name_and_by_detection() {
    let room = Room::with(&[("rates.csv", THROUGHPUTS)]);
    for (i, (format, text)) in SAMPLES.iter().enumerate() {
        room.put("t", text);
        let sim = "sim t --cluster 1x2 --throughputs rates.csv";
        let detected = room.json(sim);
        assert_eq!(detected["format"], *format, "sample {i}");
        assert!(
            detected["jobs"].as_u64() > Some(0) && detected["jobs"] == detected["finished"],
            "{detected}"
        );
        assert_eq!(detected["dropped_rows"], 0);
        let named = room.json(&format!("{sim} --format {format}"));
        assert_eq!(named["avg_jct_s"], detected["avg_jct_s"]);
        room.put("t", gzip(text));
        assert_eq!(room.json(sim)["avg_jct_s"], detected["avg_jct_s"]);
        let stats = room.works("trace stats t --cluster 1x2 --throughputs rates.csv");
        assert!(stats.contains(&format!("{format}\n")), "{stats}");
        let _ = room.works("trace convert t --throughputs rates.csv -o own.jsonl");
        assert_eq!(room.json("sim own.jsonl --cluster 1x2")["avg_jct_s"], detected["avg_jct_s"]);
    }
    room.put("t", SAMPLES.iter().find(|s| s.0 == "gavel").unwrap().1);
    room.refuses("sim t", expect![[r#"
        error: could not read trace "t": the jobs have step counts but no durations, and no throughput table was given
        hint: pass --throughputs with a CSV of columns gpu, job_type, scale_factor, steps_per_s
    "#]]);
    room.refuses("sim t --throughputs rates.csv --gpu-model k80", expect![[r#"
        error: could not read throughput table "rates.csv": no throughputs for GPU model "k80"; the table has v100
        hint: pass --gpu-model with one of these
    "#]]);
    room.refuses(
        "sim t --throughputs nope.csv",
        expect![[r#"
            error: could not read throughput table "nope.csv": no such file
        "#]],
    );
}

#[test]
fn names_may_hold_any_character_of_the_format() {
    let room = Room::with(&[]);
    let text = r#"{"id":"ünï 作业, \"q\"","submit_s":0,"gpus":1,"duration_s":10,"team":"a,b"}
{"id":"two\nlines","submit_s":1,"gpus":1,"duration_s":10}
{"id":"red\u001b[31m","submit_s":2,"gpus":1,"duration_s":10}
"#;
    room.put("t.jsonl", text);
    let _ = room.works("sim t.jsonl --cluster 1x1 -p fifo --journal j.jsonl");
    for name in ["ünï 作业, \"q\"", "two\nlines", "red\u{1b}[31m"] {
        let outcome = room.run_with(&["explain", name, "-j", "j.jsonl"]);
        assert!(outcome.code == Some(0) && outcome.out.ends_with("finished\n"), "{}", outcome.err);
    }
    room.refuses(
        "explain two -j j.jsonl",
        expect![[r#"
            error: there is no job "two" in j.jsonl
            hint: did you mean "two\nlines"?
        "#]],
    );
    room.refuses(
        "explain red -j j.jsonl",
        expect![[r#"
            error: there is no job "red" in j.jsonl
            hint: did you mean "red\u{1b}[31m"?
        "#]],
    );
    // Nothing is written, not even the valid lines before it.
    room.refuses("trace convert t.jsonl", expect![[r#"
        error: could not write to standard output: a line break in "two\nlines" cannot be written as CSV, only as .jsonl
    "#]]);
    room.refuses("trace convert t.jsonl -o t.csv", expect![[r#"
        error: could not write t.csv: a line break in "two\nlines" cannot be written as CSV, only as .jsonl
    "#]]);
    let _ = room.works("trace convert t.jsonl -o same.jsonl");
    assert_eq!(room.text("same.jsonl"), text);
    let outcome =
        room.run_with(&["report", "j.jsonl", "-o", "r.html", "--title", "</title><script>x"]);
    assert_eq!(outcome.code, Some(0));
    assert!(!room.text("r.html").contains("<script>x"));
}

#[test]
fn conversion_round_trips() {
    let room = Room::with(&[]);
    let _ = room.works("trace synth -n 200 --seed 3 -o a.csv");
    for (from, to) in [
        ("a.csv", "b.jsonl"),
        ("b.jsonl", "c.csv.gz"),
        ("c.csv.gz", "d.jsonl.gz"),
        ("d.jsonl.gz", "e.csv"),
    ] {
        let _ = room.works(&format!("trace convert {from} -o {to}"));
    }
    assert!(room.bytes("a.csv") == room.bytes("e.csv"));
    assert_eq!(room.works("trace convert a.csv"), room.text("a.csv"));
}

#[test]
fn synthetic_traces_depend_only_on_their_options() {
    let room = Room::with(&[]);
    let synth = |rest: &str| room.works(&format!("trace synth -n 50 {rest}"));
    assert_eq!(synth("--seed 1"), synth("--seed 1"));
    assert_ne!(synth("--seed 1"), synth("--seed 2"));
    for mix in ["small", "philly", "helios", "pai", "tiresias"] {
        for arrivals in ["poisson", "bursty", "diurnal"] {
            assert_eq!(synth(&format!("--mix {mix} --arrivals {arrivals}")).lines().count(), 51);
        }
    }
}

#[test]
fn stats_come_in_sections() {
    let room = Room::with(&[]);
    let _ = room.works("trace synth -n 500 -o t.csv");
    let stats = room.works("trace stats t.csv --cluster 8x8");
    let sections: Vec<&str> = stats.split("\n\n").map(|s| s.split("  ").next().unwrap()).collect();
    expect![[r#"
        format
        GPUs
        GPUs, exactly
        duration
        arrivals
        team
        model"#]]
    .assert_eq(&sections.join("\n"));
    assert_eq!(room.json("trace stats t.csv")["jobs"], 500);
}
