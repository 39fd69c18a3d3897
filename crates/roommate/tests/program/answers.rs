//! The program's results: values, order and format, independent of flags that must not matter.

use crate::{GOOD, Room, timeless};
use expect_test::expect;
use serde_json::Value;

const KEYS: [&str; 10] = [
    "policy",
    "jobs",
    "finished",
    "avg_jct_s",
    "median_jct_s",
    "p99_jct_s",
    "makespan_s",
    "events",
    "wall_s",
    "peak_rss_mib",
];

fn has_keys(result: &Value) {
    KEYS.iter().for_each(|key| assert!(!result[key].is_null(), "{key} in {result}"));
}

#[test]
fn no_policy_beats_the_lower_bound() {
    let room = Room::with(&[]);
    let policies = "roommate,srtf,srsf,muri-s,muri-l,gandiva,horus,kernel-est,mps,chronus";
    let mut least = f64::INFINITY;
    for (cluster, seed) in [("2x4", 1), ("1x8", 2), ("4x8", 3), ("2x2:v100,2x2:t4", 4)] {
        for truth in ["measured", "utilization"] {
            let words = format!("--cluster {cluster} --seed {seed} --truth {truth} -p {policies}");
            let outcome = room.run(&format!("compare {words} -o json"));
            let found: Value = serde_json::from_str(&outcome.out).unwrap();
            let bound_s = found["bound_s"].as_f64().unwrap();
            for result in found["results"].as_array().unwrap() {
                let mean_s = result["avg_jct_s"].as_f64().unwrap();
                assert!(mean_s >= bound_s, "{words}: {result}");
                least = least.min(mean_s / bound_s);
            }
        }
    }
    assert!(least < 1.5, "the bound says something: the best policy is at {least} of it");
}

#[test]
fn sim_prints_a_table() {
    let room = Room::with(&[("t.csv", GOOD)]);
    let outcome = room.run("sim t.csv --cluster 1x2 -p fifo --gantt");
    expect![[r#"
        t.csv: 3 jobs on 1x2 (2 GPUs)

                                        fifo
        jobs                               3
        finished                           3
        mean completion time         2.2 min
        median completion time       2.3 min
        p90 completion time          2.7 min
        p99 completion time          2.7 min
        makespan                     3.0 min
        mean queueing                 73.3 s
        p99 queueing                 2.2 min
        GPU time held                  63.9%
        finish-time fairness, mean     2.147
        finish-time fairness, worst    4.613
        Jain index                     0.684
        stretch, guaranteed, mean          1
        stretch, guaranteed, p99           1

        gpu0  aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaabbbbbbbbbbbbbbbbbbbbbbbbbccccccccccccccc
        gpu1  ..................................................bbbbbbbbbbbbbbbbbbbbbbbbb
    "#]].assert_eq(&outcome.out);
    assert_eq!((outcome.code, outcome.err.as_str()), (Some(0), ""));
    let outcome = room.run("compare t.csv --cluster 1x2 -p sjf,fifo");
    expect![[r#"
                                         mean    p99              mean    GPU
                             knows        JCT    JCT   makespan   wait   held
        policy       family  durations      s    min        min      s      %
        sjf          queue   yes         90.0*  2.33*      2.50*  30.0*  76.7
        fifo         queue   no         133.3   2.67       3.00   73.3   63.9
        lower bound                      60.0      -          -      -      -
        * best of its column
        no policy can finish all jobs with a mean JCT below 60.0 s, 33.3% below the best here
    "#]]
    .assert_eq(&outcome.out);
    assert_eq!(outcome.err, "t.csv: 3 jobs on 1x2 (2 GPUs)\n");
    let outcome = room.run("compare t.csv --cluster 1x2 -p sjf,fifo --wide");
    expect![[r#"
                                         sjf       fifo
        jobs                               3          3
        finished                           3          3
        mean completion time          90.0 s *  2.2 min
        median completion time       100.0 s *  2.3 min
        p90 completion time          2.3 min *  2.7 min
        p99 completion time          2.3 min *  2.7 min
        makespan                     2.5 min *  3.0 min
        mean queueing                 30.0 s *   73.3 s
        p99 queueing                  90.0 s *  2.2 min
        GPU time held                  76.7%      63.9%
        finish-time fairness, mean     1.028 *    2.147
        finish-time fairness, worst    1.508 *    4.613
        Jain index                     0.871 *    0.684
        stretch, guaranteed, mean          1          1
        stretch, guaranteed, p99           1          1
        * best of its row
        no policy can finish all jobs with a mean JCT below 60.0 s, 33.3% below the best here
    "#]]
    .assert_eq(&outcome.out);
    assert_eq!(outcome.err, "t.csv: 3 jobs on 1x2 (2 GPUs)\n");
}

#[test]
fn json_has_the_promised_keys() {
    let room = Room::with(&[("t.csv", GOOD)]);
    let result = room.json("sim t.csv --cluster 1x2");
    has_keys(&result);
    assert_eq!((&result["policy"], &result["jobs"]), (&"tiresias".into(), &3.into()));
    let compared = room.json("compare t.csv --cluster 1x2 -p all");
    let results = compared["results"].as_array().unwrap();
    results.iter().for_each(has_keys);
    let policies = room.json("policies");
    let names = |list: &[Value], key: &str| list.iter().map(|r| r[key].clone()).collect::<Vec<_>>();
    assert_eq!(names(results, "policy"), names(policies.as_array().unwrap(), "name"));
}

#[test]
fn a_first_comparison_has_one_policy_of_each_family() {
    let room = Room::with(&[("t.csv", GOOD)]);
    let outcome = room.run("compare t.csv --cluster 1x2");
    let families: Vec<Value> =
        room.json("policies").as_array().unwrap().iter().map(|p| p["family"].clone()).collect();
    for family in &families {
        let rows =
            outcome.out.lines().filter(|l| l.contains(&format!("  {} ", family.as_str().unwrap())));
        assert_eq!(rows.count(), 1, "{family}: {}", outcome.out);
    }
    let all = format!("`-p all` runs all {}", families.len());
    assert!(outcome.err.contains(&all), "{}", outcome.err);
    assert!(!room.run("compare t.csv --cluster 1x2 -p fifo").err.contains("-p all"));
}

#[test]
fn a_comparison_is_sorted_by_any_figure() {
    let room = Room::with(&[("t.csv", GOOD)]);
    let first = |flags: &str| -> Vec<String> {
        let out = room.works(&format!("compare t.csv --cluster 1x2 -p fifo,sjf {flags}"));
        let rows = out.lines().filter(|l| l.starts_with("fifo") || l.starts_with("sjf"));
        rows.map(|l| l.split([' ', ',']).next().unwrap().to_owned()).collect()
    };
    assert_eq!(first(""), ["sjf", "fifo"]);
    assert_eq!(first("--sort jain"), ["sjf", "fifo"]);
    assert_eq!(first("--sort finished"), ["fifo", "sjf"]);
    // CSV and JSON keep the given order unless --sort is given.
    assert_eq!(first("-o csv"), ["fifo", "sjf"]);
    assert_eq!(first("-o csv --sort avg_jct_s"), ["sjf", "fifo"]);
    let refused = room.run("compare t.csv --cluster 1x2 --sort nope");
    assert!(refused.err.contains("hint: there are jobs, finished, avg_jct_s"), "{}", refused.err);
}

#[test]
fn compare_equals_sim_for_any_number_of_threads() {
    let room = Room::with(&[]);
    let world = "--cluster 2x4 --seed 5 --crash 0.1";
    let asked = ["tiresias", "fifo", "srtf", "sjf"];
    let compare = |more: &str| {
        let line = format!("compare {world} -p {} {more}", asked.join(","));
        room.json(&line)["results"]
            .as_array()
            .unwrap()
            .iter()
            .cloned()
            .map(timeless)
            .collect::<Vec<_>>()
    };
    let one = compare("-j 1 --journals one");
    let many = compare("-j 8 --journals many");
    assert_eq!(one, many);
    for (name, result) in asked.iter().zip(&one) {
        assert_eq!(result["policy"], *name);
        let alone = timeless(room.json(&format!("sim {world} -p {name} --journal {name}.jsonl")));
        let figures = result.as_object().unwrap();
        figures.iter().for_each(|(key, value)| assert_eq!(alone[key], *value, "{name} {key}"));
        let journals = ["", "one/", "many/"].map(|dir| room.bytes(&format!("{dir}{name}.jsonl")));
        assert!(journals[0] == journals[1] && journals[1] == journals[2], "{name}");
    }
}

#[test]
fn every_csv_line_has_the_same_number_of_cells() {
    let room = Room::with(&[("t.csv", GOOD)]);
    let _ = room.works("sim t.csv --cluster 1x2 --journal j.jsonl");
    for (line, rows) in [
        ("sim t.csv --cluster 1x2", 1),
        ("sim t.csv --crash 1", 1),
        ("compare t.csv --cluster 1x2 -p fifo,sjf", 2),
        ("replay j.jsonl", 1),
        ("trace stats t.csv --cluster 1x2", 20),
    ] {
        let csv = room.works(&format!("{line} -o csv"));
        let cells: Vec<usize> = csv.lines().map(|l| l.split(',').count()).collect();
        assert!(cells.len() > rows && cells.iter().all(|c| *c == cells[0]), "{csv}");
    }
}

#[test]
fn jobs_finish_earlier_on_faster_gpu_models() {
    let room = Room::with(&[]);
    room.put(
        "t.csv",
        "id,submit_s,gpus,duration_s,kinds\nslow,0,2,1000,v100\nfast,0,2,1000,a100\n\
         any,5000,1,100,\n",
    );
    let result = room.json("sim t.csv --cluster 1x2:v100,1x2:a100 --journal j.jsonl");
    assert_eq!((&result["finished"], &result["gpus"]), (&3.into(), &4.into()));
    let end = |job: &str| {
        let history = room.json(&format!("explain {job} -j j.jsonl"));
        let last = history["moments"].as_array().unwrap().last().unwrap().clone();
        assert_eq!(last["what"], "finished");
        last["at_s"].as_f64().unwrap()
    };
    assert_eq!((end("slow"), end("fast")), (1_000.0, 500.0));
    assert!(room.works("replay j.jsonl").starts_with("same: "));
    let slower = room.json("sim --cluster 2x4:v100")["avg_jct_s"].as_f64();
    assert!(room.json("sim --cluster 2x4:a100")["avg_jct_s"].as_f64() < slower);
}

#[test]
fn a_large_gang_spans_several_gpu_models() {
    let room = Room::with(&[("t.csv", "id,submit_s,gpus,duration_s\na,0,3,100\nb,0,2,100\n")]);
    let compared = room.json("compare t.csv --cluster 1x2:v100,1x2:a100 -p all");
    for result in compared["results"].as_array().unwrap() {
        assert_eq!(result["finished"], 2, "{result}");
    }
}

#[test]
fn sim_runs_without_a_trace_on_any_cluster() {
    let room = Room::with(&[]);
    for cluster in ["1x1", "2x4:k80", "1x2:v100,1x2:k80", "4x8:h200", "1x1:mine=0.5:4c"] {
        let result = room.json(&format!("sim --cluster {cluster}"));
        assert_eq!(result["finished"], 500, "{cluster}");
    }
}

#[test]
fn policies_are_listed_and_described() {
    let room = Room::with(&[]);
    let list = room.works("policies");
    for name in ["fifo", "fifo-backfill", "sjf", "srtf", "srsf", "tiresias", "tiresias-gittins"] {
        assert!(
            list.lines().any(|l| l.split_whitespace().next() == Some(name)),
            "{name} in {list}"
        );
        let page = room.works(&format!("policies {name}"));
        let headings = page.lines().filter(|l| l.starts_with("# ")).count();
        assert!(headings >= 3 && page.contains("# Parameters (set with --set"), "{page}");
    }
    let page = room.works("policies tiresias");
    let headings: Vec<&str> = page.lines().filter(|l| l.starts_with("# ")).collect();
    expect![[r#"
        # Idea
        # Reads / does / wakes
        # Differs from the paper
        # Parameters (set with --set name=value)
        # --compat muri"#]]
    .assert_eq(&headings.join("\n"));
    assert!(page.contains("  promote_knob        null\n"), "{page}");
}

#[test]
fn a_parameter_can_be_set() {
    let room = Room::with(&[("t.csv", GOOD)]);
    let set = room.json("sim t.csv --cluster 1x2 -p fifo --set backfill=true");
    let named = room.json("sim t.csv --cluster 1x2 -p fifo-backfill");
    let plain = room.json("sim t.csv --cluster 1x2 -p fifo");
    assert_eq!(set["avg_jct_s"], named["avg_jct_s"]);
    assert_ne!(set["avg_jct_s"], plain["avg_jct_s"]);
    let compared = room.json("compare t.csv --cluster 1x2 -p sjf,fifo --set fifo.backfill=true");
    assert_eq!(compared["results"][1]["avg_jct_s"], named["avg_jct_s"]);
}

#[test]
fn compat_runs_all_policies_that_support_it() {
    let room = Room::with(&[("t.csv", GOOD)]);
    let compared = room.json("compare t.csv --cluster 1x2 --compat muri");
    let results = compared["results"].as_array().unwrap();
    let names: Vec<&Value> = results.iter().map(|r| &r["policy"]).collect();
    assert_eq!(names[..5], ["srtf", "srsf", "tiresias", "muri-s", "muri-l"]);
    assert!(!names.contains(&&Value::from("fifo")), "fifo has no parameters for it");
}
