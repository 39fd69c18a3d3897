//! Services: output, journal and explanation of runs that have them.

use crate::Room;
use expect_test::expect;

/// Two services that meet their SLOs, one that cannot, and training beside them.
const SERVED: &str = "id,submit_s,gpus,duration_s,class,model,batch,slo_ms,load,requests\n\
    photos,0,1,0,service,resnet50,16,150,0:200|600:600|1200:200,\n\
    chat,0,1,0,service,gpt2,16,2,50,\n\
    replayed,0,1,0,service,bert,16,330,,times.csv\n\
    train,30,1,7200,,resnet18,,,,\n";

fn room() -> Room {
    Room::with(&[("t.csv", SERVED), ("times.csv", "time_s\n0\n0.5\n0.6\n2\n")])
}

#[test]
fn a_run_reports_the_requests_of_its_services() {
    let room = room();
    let out = room.works("sim t.csv -p fifo --cluster 1x4:h200 --truth none");
    let services = out.split("\n\n").nth(2).unwrap_or_default();
    expect![[r#"
        service        SLO   median      p99  worst p99     late  windows over  in time
        chat        2.0 ms   8.8 ms  16.7 ms    17.0 ms  100.00%       100.00%    0.0/s
        photos    150.0 ms  16.6 ms  22.7 ms    22.7 ms    0.00%         0.00%  328.0/s
        replayed  330.0 ms  40.8 ms  41.0 ms    41.0 ms    0.00%         0.00%    1.5/s
    "#]]
    .assert_eq(services);
    let json = room.json("sim t.csv -p fifo --cluster 1x4:h200 --truth none");
    assert_eq!((&json["jobs"], &json["finished"]), (&1.into(), &1.into()));
    let all = json["services"].as_array().unwrap();
    assert_eq!(all.len(), 3);
    assert_eq!(all[1]["late"], all[1]["requests"]);
    assert_eq!(all[0]["slo_us"], 150_000);
    let csv = room.works("sim t.csv -p fifo --cluster 1x4:h200 --truth none -o csv");
    assert!(csv.lines().next().unwrap().contains("late_requests,slo_misses,p50_ms"));
}

#[test]
fn a_service_is_explained_and_its_journal_replays() {
    let room = room();
    room.works("sim t.csv -p fifo --cluster 1x4:h200 --truth none --journal j.jsonl");
    expect![[r#"
        chat
            0.0s  submitted; GPUs not held: 4, other jobs waiting: 1
            0.0s  started on node 0: GPU 1
           20.0s  answers requests
           30.0s  misses its objective in 1 of 1 windows: 510 of 510 requests late, p99 16.7 ms, at worst 16.7 ms
         30m 30s  ended
    "#]].assert_eq(&format!("chat\n{}", room.works("explain chat --journal j.jsonl")));
    let photos = room.works("explain photos --journal j.jsonl");
    assert!(photos.contains("keeps its objective") && !photos.contains("misses"), "{photos}");
    assert!(room.works("replay j.jsonl").contains("same"));
    room.works("report j.jsonl -o r.html");
    let page = room.text("r.html");
    assert!(page.contains("<h2 id=\"h-services\">Services</h2>"));
    assert_eq!(page.matches("class=\"strip\"").count(), 3);
}

#[test]
fn exact_requests_and_window_length_are_options() {
    let room = room();
    let json = room.json("sim t.csv -p fifo --cluster 1x4:h200 --exact-requests --window 60");
    let windows = |json: &serde_json::Value| json["services"][0]["windows"].as_u64().unwrap();
    let fine = room.json("sim t.csv -p fifo --cluster 1x4:h200 --exact-requests");
    assert!((5..=7).contains(&(windows(&fine) / windows(&json))));
    room.refuses(
        "sim t.csv --window 0",
        expect![[r#"
        error: invalid value '0' for '--window <S>': expected a number from 0.1 to 86400

        For more information, try '--help'.
    "#]],
    );
}

#[test]
fn errors_of_services_are_named() {
    let room = Room::with(&[
        ("unknown.csv", "id,submit_s,gpus,duration_s,class,load\na,0,1,0,service,5\n"),
        ("file.csv", "id,submit_s,gpus,duration_s,class,model,requests\na,0,1,0,service,bert,no\n"),
        ("load.csv", "id,submit_s,gpus,duration_s,class,model,load\na,0,1,0,service,bert,lots\n"),
    ]);
    room.refuses("sim unknown.csv", expect![[r#"
        error: job "a" can never run on 8x8: it names no model: name a measured one, or give step_s, the seconds of a batch
        hint: use another --cluster, or --skip-bad-rows to drop such jobs and count them
    "#]]);
    room.refuses(
        "sim file.csv",
        expect![[r#"
        error: could not read file of requests "no": no such file
    "#]],
    );
    room.refuses("sim load.csv", expect![[r#"
        error: could not read trace "load.csv": line 2, column "load": expected a number, found "lots"
        hint: pass --skip-bad-rows to drop such rows and count them
    "#]]);
}
