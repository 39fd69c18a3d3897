//! Measured profiles: the model fitted to them, checks against them, and invalid ones.

use crate::{Room, gzip};
use expect_test::expect;
use std::fs;
use std::path::{Path, PathBuf};

/// A file of the measurements in the repository.
fn measured(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../profiles").join(name)
}

/// A folder with all of them.
fn room() -> Room {
    let room = Room::with(&[]);
    for name in ["h200.jsonl", "h200-pairs.jsonl"] {
        room.put(name, fs::read(measured(name)).unwrap());
    }
    room
}

/// A row of a task alone.
fn alone(name: &str, sms: u32, it_s: f64) -> String {
    format!(
        "{{\"kind\":\"train\",\"name\":\"{name}\",\"batch\":8,\"sms\":{sms},\"mem_mib\":900,\
         \"it_s\":{it_s},\"gpm\":{{\"graphics\":90,\"sm_util\":80,\"dram\":20,\
         \"pcie_rx_mib_s\":50}}}}\n"
    )
}

/// A row of two training tasks on one GPU.
fn pair(a: &str, b: &str, it_s: f64) -> String {
    let side = format!("{{\"it_s\":{it_s}}}");
    format!(
        "{{\"k\":\"tt\",\"a\":\"{a}\",\"batch_a\":8,\"b\":\"{b}\",\"batch_b\":8,\
         \"ra\":{side},\"rb\":{side}}}\n"
    )
}

#[test]
fn a_fit_reports_its_error_on_held_out_data() {
    let fit = room().json("profile fit h200");
    assert_eq!((&fit["tasks"], &fit["pairs"]), (&18.into(), &148.into()));
    for kind in ["tt", "ts", "all"] {
        for left_out in ["leave_one_task_out", "leave_one_pair_out"] {
            let mae = fit[left_out][kind]["mae"].as_f64().unwrap();
            assert!(mae > 0.0 && mae < 0.1, "{left_out} {kind} {mae}");
        }
    }
    let coefficients = fit["coefficients"].as_object().unwrap();
    assert!(coefficients.values().all(|v| v.as_f64() > Some(0.0)), "{coefficients:?}");
    assert_eq!(fit["leave_one_task_out"]["tasks"].as_array().unwrap().len(), 18);
}

#[test]
fn a_check_prefers_measured_pairs() {
    let room = room();
    let check = room.json("profile check h200 h200-pairs.jsonl");
    assert_eq!((&check["pairs"], &check["sides"]), (&148.into(), &196.into()));
    let number = |key: &str| check[key].as_f64().unwrap();
    assert!(number("mae") < 0.03 && number("mae") < number("model_mae"), "{check}");
    assert!(number("model_mae") < 0.1 && number("p90_abs_error") < 0.1, "{check}");
    assert_eq!(check["by_kind"]["tt"]["sides"], 96);
    assert_eq!(check["by_kind"]["ts"]["sides"], 100);
    // A folder means all its files; compressed files are read as well.
    fs::create_dir(room.path("all")).unwrap();
    room.put("all/solo.jsonl", room.bytes("h200.jsonl"));
    room.put("all/pairs.jsonl", room.bytes("h200-pairs.jsonl"));
    room.put("pairs.gz", gzip(room.bytes("h200-pairs.jsonl")));
    assert_eq!(room.json("profile check all pairs.gz"), check);
    for line in ["profile check h200 h200-pairs.jsonl", "profile fit h200"] {
        let csv = room.works(&format!("{line} -o csv"));
        assert!(csv.lines().count() > 10 && csv.starts_with("figure,value\n"), "{csv}");
    }
}

#[test]
fn pairs_are_checked_against_their_own_session() {
    let room = Room::with(&[
        ("own.jsonl", &(alone("x", 132, 10.0) + &alone("y", 132, 10.0))),
        ("pairs.jsonl", &pair("x", "y", 5.0)),
    ]);
    let by_profile = room.json("profile check own pairs.jsonl");
    // In a session in which both tasks ran half as fast alone, the same rates mean no slowdown.
    let slow = |name: &str| {
        alone(name, 132, 5.0).replace("\"kind\":\"train\",\"name\"", "\"k\":\"solo\",\"a\"")
    };
    room.put("pairs.jsonl", slow("x") + &slow("y") + &pair("x", "y", 5.0));
    let by_session = room.json("profile check own pairs.jsonl");
    assert!(by_profile["mae"].as_f64() < Some(0.2), "{by_profile}");
    assert!(by_session["mae"].as_f64() > Some(0.3), "{by_session}");
}

#[test]
fn a_check_prints_a_table_and_the_skipped_rows() {
    let room = Room::with(&[
        ("own.jsonl", &(alone("x", 132, 10.0) + &alone("x", 66, 6.0))),
        ("pairs.jsonl", &(pair("x", "x", 6.0) + &pair("x", "stranger", 5.0))),
    ]);
    let outcome = room.run("profile check own pairs.jsonl");
    assert_eq!(outcome.code, Some(0));
    expect![[r#"
        left out 1 pair of unknown tasks: stranger
    "#]]
    .assert_eq(&outcome.err);
    expect![[r#"
        own against 1 pair of pairs.jsonl

                                   sides  error    p90  model only    p90
        two training tasks             2  0.022  0.022       0.022  0.022
        training beside a service      0  0.000  0.000       0.000  0.000
        all                            2  0.022  0.022       0.022  0.022
    "#]]
    .assert_eq(&outcome.out);
    assert_eq!(room.json("profile check own pairs.jsonl")["skipped"], 1);
}

#[test]
fn advice_names_a_configuration_or_the_reason_for_none() {
    let split =
        pair("x", "y", 7.0).replace("\"batch_b\":8,", "\"batch_b\":8,\"sms_a\":64,\"sms_b\":68,");
    let alone = alone("x", 132, 10.0) + &alone("x", 64, 8.0) + &alone("y", 132, 10.0);
    let failed = "{\"k\":\"tt\",\"a\":\"y\",\"batch_a\":8,\"b\":\"y\",\"batch_b\":8,\
                  \"error\":\"y: ended\"}\n";
    let room = Room::with(&[
        (
            "own.jsonl",
            &(alone.clone() + &pair("x", "y", 6.0) + &split + &pair("x", "x", 5.2) + failed),
        ),
        ("alone.jsonl", &alone),
    ]);
    expect![[r#"
        set        one at a time  unconfined  best        sum   slowdowns  decision
        x@8 + x@8  1.00           1.04        unconfined  1.04  1.92 1.92  decline: in every configuration a task takes over 1.5 times as long: 1.92 at best
        x@8 + y@8  1.00           1.20        64+68 SMs   1.40  1.43 1.43  share
        worth sharing a GPU: 1 of 2
    "#]]
    .assert_eq(&room.works("profile advise own"));
    expect![[r#"
        set,one_at_a_time,unconfined,best_way,sum,slowdowns,decision,reason
        x@8 + x@8,1,1.040,unconfined,1.040,1.92 1.92,decline,"throughput is 1.04 of one task at a time, less than 1.1"
        x@8 + y@8,1,1.200,64+68 SMs,1.400,1.43 1.43,share,""
    "#]]
    .assert_eq(&room.works("profile advise own --bound 2 -o csv"));
    let strict = room.json("profile advise own --least 1.5");
    assert_eq!((&strict["shared"], &strict["declined"]), (&0.into(), &2.into()));
    assert_eq!(
        strict["sets"][1]["reason"],
        "throughput is 1.40 of one task at a time, less than 1.5"
    );
    room.refuses(
        "profile advise alone",
        expect![[r#"
            error: measurements "alone" have no sets
            hint: `roommate profile measure` measures the `sets` of a plan
        "#]],
    );
}

#[test]
fn measurements_must_exist_and_be_valid() {
    let good = alone("x", 132, 10.0);
    let room = Room::with(&[
        ("own.jsonl", &good),
        ("pairs.jsonl", &pair("x", "x", 5.0)),
        ("strangers.jsonl", &pair("y", "z", 5.0)),
        ("bad.jsonl", &format!("{good}\n{}", good.replace("10", "\"fast\""))),
        ("negative.jsonl", &pair("x", "x", -1.0)),
    ]);
    room.refuses(
        "profile fit nope",
        expect![[r#"
            error: no measurements at "nope"
            hint: give a folder or a prefix of .jsonl file names, such as profiles/h200
        "#]],
    );
    room.refuses(
        "profile fit own",
        expect![[r#"
            error: measurements "own" have no pairs to fit
            hint: rows of pairs have `k` (tt or ts), `a` and `b`
        "#]],
    );
    room.refuses(
        "profile fit pairs",
        expect![[r#"
            error: measurements "pairs": no task was measured alone on the whole GPU
            hint: rows of tasks alone have `kind`, `name`, `batch`, `sms` and `it_s`
        "#]],
    );
    room.refuses("profile fit bad", expect![[r#"
        error: could not read measurements "bad.jsonl": line 3: invalid type: string "fast", expected f64
    "#]]);
    room.refuses(
        "profile check own negative.jsonl",
        expect![[r#"
        error: could not read measurements "negative.jsonl": line 1: it_s is -1, expected 0 or more
    "#]],
    );
    room.refuses(
        "profile check own nope.jsonl",
        expect![[r#"
        error: could not read measurements "nope.jsonl": no such file
    "#]],
    );
    room.refuses(
        "profile check own own.jsonl",
        expect![[r#"
        error: "own.jsonl" has no pairs
        hint: rows of pairs have `k` (tt or ts), `a` and `b`
    "#]],
    );
    room.refuses(
        "profile check own strangers.jsonl",
        expect![[r#"
            error: "own" knows none of the pairs of "strangers.jsonl": no y, z
            hint: it knows x
        "#]],
    );
}

/// The numbers of a sentence: its wording may change, the measured values may not.
fn figures(text: &serde_json::Value) -> Vec<f64> {
    text.as_str()
        .into_iter()
        .flat_map(str::split_whitespace)
        .filter_map(|w| w.parse().ok())
        .collect()
}

/// The program's advice for sets measured on a real GPU is as their results record it.
#[test]
fn advice_for_real_sets_matches_the_recorded_results() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/results/h200");
    let read = |name: String| std::fs::read_to_string(format!("{folder}/{name}")).unwrap();
    for part in ["sets", "large"] {
        let room = Room::with(&[("tried.jsonl", &read(format!("{part}/tried.jsonl")))]);
        let found = room.json("profile advise tried");
        let found = found["sets"].as_array().unwrap();
        let results = read(format!("{part}.jsonl"));
        assert_eq!(results.lines().count(), found.len());
        for line in results.lines() {
            let row: serde_json::Value = serde_json::from_str(line).unwrap();
            let of_set = |a: &&serde_json::Value| a["tasks"] == row["set"];
            let advice = found.iter().find(of_set).unwrap();
            let chosen = match (&advice["best"], &advice["best"]["sms"]) {
                (serde_json::Value::Null, _) => "declined".into(),
                (_, serde_json::Value::Null) => "unconfined".into(),
                (_, sms) => sms.clone(),
            };
            assert_eq!(chosen, row["way"], "{row}");
            assert_eq!(figures(&advice["reason"]), figures(&row["reason"]), "{row}");
        }
    }
}
