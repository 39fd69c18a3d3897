use super::*;
use crate::truth;
use roommate_core::math::stat;

fn parse(text: &str) -> Result<Scenario, ScenarioError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.toml");
    std::fs::write(&path, text).unwrap();
    Scenario::read(&path, &truth::h200().unwrap())
}

const SMALL: &str = r#"about = "small"
cluster = "1x2:h200=1"
ours = "fifo"

[arrivals]
tasks = 10
gaps_s = [[0.0, 0.01], [0.5, 0.7], [0.533, 1.0], [0.9, 25.4], [1.0, 276.0]]

[sizes]
S = [0.1, 1.0]

[[task]]
model = "VGG16"
batch = 512
size = "S"
share = 2
measured = "vgg16-cifar"
because = "it is the same"

[[task]]
model = "NCF"
batch = 1024
size = "S"
share = 1
measured = "ncf-ml20m"
because = "it is the same"

[[policy]]
name = "fifo"
"#;

fn refusal(from: &str, to: &str) -> String {
    assert!(SMALL.contains(from), "{from}");
    let error = parse(&SMALL.replacen(from, to, 1)).unwrap_err();
    let text = error.to_string();
    let what = text.split_once(": ").unwrap().1;
    format!("{what} ({})", error.hint())
}

#[test]
fn errors_have_a_line_and_a_suggestion() {
    let schema = "(docs/reference/scenarios.md describes the file)";
    let cases = [
        (
            "share = 2",
            "shar = 2",
            "line 16: unknown field `shar`, expected one of `model`, `dataset`, `batch`, \
             `optimizer`, `size`, `share`, `measured`, `measured_batch`, `because`, \
             `noise_scale`, `batch_range` (did you mean `share`?)"
                .to_string(),
        ),
        (
            "tasks = 10",
            "tasks = 0",
            format!("line 5: [arrivals]: expected 1 to 1000000 tasks {schema}"),
        ),
        (
            "gaps_s",
            "mean_gap_s = 3.0\ngaps_s",
            format!(
                "line 5: [arrivals]: expected exactly one of gaps_s, mean_gap_s and trace \
                 {schema}"
            ),
        ),
        (
            "[0.5, 0.7]",
            "[0.5, 7.0]",
            format!(
                "line 5: [arrivals]: gaps_s: expected rising [share, seconds] from share 0 to 1, \
                 seconds above 0 {schema}"
            ),
        ),
        (
            "S = [0.1, 1.0]",
            "S = [1.0, 0.1]",
            format!("line 10: size S: expected GPU-hours above 0, the smaller first {schema}"),
        ),
        (
            "vgg16-cifar",
            "vgg16-cifr",
            "line 12: task \"VGG16\": no training task \"vgg16-cifr\" was measured \
             (did you mean `vgg16-cifar`?)"
                .into(),
        ),
        (
            "size = \"S\"",
            "size = \"Q\"",
            "line 12: task \"VGG16\": [sizes] has no \"Q\" (did you mean `S`?)".into(),
        ),
        (
            "name = \"fifo\"",
            "name = \"fifoo\"",
            "line 28: there is no policy \"fifoo\" (did you mean `fifo`?)".into(),
        ),
        (
            "name = \"fifo\"",
            "name = \"fifo\"\nparams = { backfil = true }",
            "line 28: policy \"fifo\": unknown field `backfil`, expected one of `backfill`, \
             `rule`, `patience_s`, `dedicate_from` (`roommate policies fifo` lists its parameters)"
                .into(),
        ),
        (
            "ours = \"fifo\"",
            "ours = \"me\"",
            "line 3: ours: no [[policy]] is called \"me\" (there are fifo)".into(),
        ),
        (
            "[[policy]]\nname = \"fifo\"\n",
            "[[policy]]\nname = \"fifo\"\n[[policy]]\nname = \"fifo\"\n",
            format!("line 30: two policies are called \"fifo\"; give one a `label` {schema}"),
        ),
    ];
    for (from, to, expected) in cases {
        assert_eq!(refusal(from, to), expected);
    }
}

/// The workload of a seed as text.
fn sampled(scenario: &Scenario, seed: u64) -> String {
    let sampled = scenario.deal(seed, &truth::h200().unwrap()).unwrap();
    let lines = sampled.workload.arrivals.iter().map(|a| format!("{} {} {}", a.at, a.name, a.work));
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn a_seed_determines_the_workload() {
    let scenario = parse(SMALL).unwrap();
    assert_eq!(sampled(&scenario, 0), sampled(&scenario, 0));
    assert_ne!(sampled(&scenario, 0), sampled(&scenario, 1));
}

#[test]
fn counts_follow_the_normalised_shares() {
    let scenario = parse(SMALL).unwrap();
    assert_eq!(scenario.counts(), [7, 3]);
    assert_eq!(scenario.remarks(), ["the shares of the tasks add to 3 %; they are normalised"]);
    let whole = SMALL.replacen("share = 2", "share = 75", 1).replacen("share = 1", "share = 25", 1);
    let scenario = parse(&whole).unwrap();
    assert_eq!(scenario.counts().iter().sum::<usize>(), 10);
    assert!(scenario.remarks().is_empty());
}

#[test]
fn gaps_are_as_bursty_as_published() {
    let scenario = parse(&SMALL.replacen("tasks = 10", "tasks = 300", 1)).unwrap();
    let (mut means, mut medians, mut below, mut longest) = (vec![], vec![], vec![], vec![]);
    for seed in 0..200 {
        let times = scenario.times_s(seed).unwrap();
        let mut gaps: Vec<f64> = times.windows(2).map(|w| w[1] - w[0]).collect();
        gaps.sort_by(f64::total_cmp);
        means.push(stat::mean(&gaps).unwrap());
        medians.push(stat::median(&gaps).unwrap());
        below.push(gaps.iter().filter(|g| **g < 1.0).count() as f64);
        longest.push(*gaps.last().unwrap());
    }
    let mean = |v: &[f64]| stat::mean(v).unwrap();
    assert!((mean(&means) / 13.4 - 1.0).abs() < 0.02, "{}", mean(&means));
    assert!((mean(&medians) / 0.7 - 1.0).abs() < 0.05, "{}", mean(&medians));
    assert!((mean(&below) / 160.0 - 1.0).abs() < 0.02, "{}", mean(&below));
    assert!((mean(&longest) / 258.0 - 1.0).abs() < 0.05, "{}", mean(&longest));
}

#[test]
fn times_faster_accelerates_arrivals() {
    let scenario = parse(SMALL).unwrap();
    let faster =
        parse(&SMALL.replacen("tasks = 10", "tasks = 10\ntimes_faster = 80.0", 1)).unwrap();
    let (slow, fast) = (scenario.times_s(3).unwrap(), faster.times_s(3).unwrap());
    assert!(slow.iter().zip(fast).all(|(s, f)| (s / 80.0 - f).abs() < 1e-9));
}

#[test]
fn arrival_times_can_come_from_a_trace() {
    let folder = tempfile::tempdir().unwrap();
    let rows: Vec<String> = (0..10).map(|i| format!("{i},{},1,5", 100 + i * 7)).collect();
    let rows = rows.join("\n");
    std::fs::write(folder.path().join("t.csv"), format!("id,submit_s,gpus,duration_s\n{rows}"))
        .unwrap();
    let gaps = SMALL.lines().find(|l| l.starts_with("gaps_s")).unwrap();
    let path = folder.path().join("x.toml");
    std::fs::write(&path, SMALL.replace(gaps, "trace = \"t.csv\"")).unwrap();
    let atlas = truth::h200().unwrap();
    let scenario = Scenario::read(&path, &atlas).unwrap();
    assert_eq!(scenario.times_s(0).unwrap()[..3], [0.0, 7.0, 14.0]);
    std::fs::write(
        &path,
        SMALL.replace(gaps, "trace = \"t.csv\"").replace("tasks = 10", "tasks = 11"),
    )
    .unwrap();
    let error = Scenario::read(&path, &atlas).unwrap().times_s(0).unwrap_err();
    assert!(error.to_string().contains("has 10 jobs, expected 11"), "{error}");
}

const SERVICE: &str = r#"
[[service]]
model = "RoBERTa"
slo_ms = 110.0
load_rps = 200.0
replicas = 2
batch = 16
measured = "roberta"
because = "it is the same"
"#;

#[test]
fn services_are_submitted_first() {
    let scenario = parse(&format!("{SMALL}{SERVICE}")).unwrap();
    let sampled = scenario.deal(0, &truth::h200().unwrap()).unwrap();
    let first: Vec<&str> = sampled.workload.arrivals[..3].iter().map(|a| a.name.as_str()).collect();
    assert_eq!(first[..2], ["roberta-service-0", "roberta-service-1"]);
    assert_eq!(sampled.workload.arrivals[0].spec.slo.map(|s| s.p99_us), Some(110_000));
    assert_eq!(sampled.works.len(), sampled.workload.profiles.len());
    assert!(sampled.works.iter().all(Option::is_some));
    for (from, to, expected) in [
        ("slo_ms = 110.0", "slo_ms = 0.0", "slo_ms: expected milliseconds above 0"),
        ("load_rps = 200.0\n", "", "expected either load_rps or load_steps"),
        ("\"roberta\"", "\"robert\"", "no service \"robert\" was measured"),
        ("batch = 16", "batch = 0", "batch: expected at least 1"),
    ] {
        let error = parse(&format!("{SMALL}{}", SERVICE.replacen(from, to, 1))).unwrap_err();
        assert_eq!(error.line, Some(31), "{error}");
        assert_eq!(error.what, format!("service \"RoBERTa\": {expected}"));
    }
}

#[test]
fn a_task_has_the_duration_of_its_size_class() {
    let scenario = parse(&SMALL.replacen("tasks = 10", "tasks = 1000", 1)).unwrap();
    let sampled = scenario.deal(0, &truth::h200().unwrap()).unwrap();
    for arrival in &sampled.workload.arrivals {
        let hours = arrival.spec.declared_s.unwrap() / 3_600.0;
        assert!((0.0999..1.0001).contains(&hours), "{hours}");
        assert!(arrival.spec.knobs.mem_mib > 1_000);
    }
}
