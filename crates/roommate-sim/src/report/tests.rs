use super::all_figures::{best, extra_digits, metric_text};
use super::data::{CDF_POINTS_MAX, GANTT_BUDGET_BYTES, Gantt, Names, STEP_POINTS_MAX, gantt};
use super::*;
use roommate_core::journal::metrics::Better;

fn run(label: &str) -> RunView {
    RunView {
        policy: label.to_owned(),
        label: label.to_owned(),
        source: format!("{label}.jsonl"),
        cluster: "1x2:v100".to_owned(),
        seed: 1,
        gpus: 2,
        nodes: vec![(0, 2)],
        end_s: 100.0,
        figures: Vec::new(),
        stays: vec![Stay { job: 0, gpu: 1, from_s: 0.0, to_s: 100.0, sm_permille: 1000 }],
        job_names: vec!["a".to_owned()],
        job_teams: vec!["team".to_owned()],
        jcts_s: vec![100.0],
        queue: vec![(0.0, 0)],
        busy: vec![(0.0, 1.0), (100.0, 0.0)],
        services: Vec::new(),
    }
}

fn with_figure(label: &str, unit: &'static str, value: f64, better: Better) -> RunView {
    let row = Row { key: "m", label: "m", unit, value: Some(value), better };
    RunView { figures: vec![row], ..run(label) }
}

fn embedded(page: &str) -> serde_json::Value {
    let start = page.find("id=\"data\">").expect("a start") + "id=\"data\">".len();
    let length = page[start..].find("</script>").expect("an end");
    serde_json::from_str(&page[start..start + length]).expect("JSON")
}

#[test]
fn best_marks_all_best_values_unless_all_are_equal() {
    let check = |values: &[Option<f64>], better, expect: &[bool]| {
        assert_eq!(best(values, better), expect, "{values:?} {better:?}");
    };
    check(&[Some(1.0), Some(2.0), Some(1.0)], Better::Lower, &[true, false, true]);
    check(&[Some(1.0), Some(2.0), None], Better::Higher, &[false, true, false]);
    check(&[Some(1.0), Some(2.0)], Better::Neither, &[false, false]);
    check(&[Some(2.0), Some(2.0)], Better::Lower, &[false, false]);
    check(&[Some(2.0)], Better::Lower, &[false]);
    check(&[Some(2.0), None], Better::Lower, &[false, false]);
    check(&[], Better::Lower, &[]);
}

#[test]
fn the_table_marks_the_best_and_has_exact_values() {
    let runs = [
        with_figure("fifo", "s", 8_040.25, Better::Lower),
        with_figure("srtf", "s", 60.0, Better::Lower),
    ];
    let page = render("t", &runs);
    assert!(page.contains("title=\"8,040.25 s\">2 h 14 m</data>"));
    assert_eq!(page.matches("class=\"best\"").count(), 1);
    let star = page.find("class=\"best\"").expect("a mark");
    assert!(page[star..].starts_with("class=\"best\"><span aria-hidden=\"true\">★ </span>"));
    assert!(page[star..star + 200].contains(">1 m</data>"));
}

#[test]
fn the_digits_explain_every_star() {
    let check = |unit: &str, a: f64, b: f64, expect: [&str; 2]| {
        let values = [Some(a), Some(b)];
        let extra = extra_digits(&values, &best(&values, Better::Lower), unit);
        let shown = [a, b].map(|v| metric_text(v, unit, extra).0);
        assert_eq!(shown, expect);
    };
    check("s", 140_700.0, 138_900.0, ["1 d 15 h 5 m", "1 d 14 h 35 m"]);
    check("s", 140_700.0, 140_707.0, ["1 d 15 h 5 m", "1 d 15 h 5 m 7 s"]);
    check("share", 0.5001, 0.5, ["50.010 %", "50.000 %"]);
    check("", 1_234.25, 1_234.0, ["1,234.25", "1,234"]);
    check("x", 2.371_034_567_8, 2.374, ["2.371 ×", "2.374 ×"]);
    check("", 5.0, 5.0, ["5", "5"]);
}

#[test]
fn names_are_escaped() {
    let evil = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>";
    let mut view = run(evil);
    view.cluster = evil.to_owned();
    view.job_names = vec![evil.to_owned()];
    view.job_teams = vec![evil.to_owned()];
    view.figures = with_figure("x", evil, 1.0, Better::Lower).figures;
    view.figures[0].label = evil;
    let page = render(evil, &[view]);
    assert!(!page.contains("<script>") && !page.contains("<!--") && !page.contains("<img"));
    assert_eq!(page.matches("</script").count(), 2);
    assert_eq!(embedded(&page)["names"][0], evil);
}

#[test]
fn the_script_cannot_end_its_own_element() {
    assert!(!SCRIPT.contains("</script") && !SCRIPT.contains("<!--"));
    assert!(!STYLE.contains("</style"));
}

/// A cluster of 1,000 GPUs with 100,000 stays and step functions of many points.
fn large(label: &str) -> RunView {
    let mut view = run(label);
    view.gpus = 1_000;
    view.nodes = (0..125).map(|n| (n * 8, 8)).collect();
    view.end_s = 360_000.0;
    view.stays = (0..100_000)
        .map(|i| {
            let from_s = f64::from(i / 1_000) * 3_600.0;
            let to_s = from_s + f64::from(i % 3_600);
            Stay { job: i, gpu: i % 1_000, from_s, to_s, sm_permille: 1000 }
        })
        .collect();
    view.job_names = (0..100_000).map(|i| format!("a job with a usual name {i}")).collect();
    view.queue = (0..200_000).map(|i| (f64::from(i) * 1.7, i * 7 % 997)).collect();
    view.queue[77_777].1 = 123_456;
    view.busy = (0..200_000).map(|i| (f64::from(i) * 1.7, f64::from(i * 7 % 997) / 3.0)).collect();
    view.jcts_s = (1..=100_000).map(|i| f64::from(i) * 1.234_567).collect();
    view
}

#[test]
fn the_size_of_a_page_is_bounded() {
    for n in [1, 4, 12] {
        let runs: Vec<RunView> = (0..n).map(|i| large(&format!("run {i}"))).collect();
        let page = render("large", &runs);
        assert!(page.len() < 5_000_000, "{n} runs: {} bytes", page.len());
        assert!(page.contains("condensed"));
        let data = embedded(&page);
        let first = &data["runs"][0];
        assert_eq!(first["gantt"]["kind"], "heat");
        assert!(first["queue"]["x"].as_array().expect("an array").len() <= STEP_POINTS_MAX);
        assert!(first["queue"]["y"].as_array().expect("an array").contains(&123_456.into()));
        assert!(first["cdf"]["x"].as_array().expect("an array").len() <= CDF_POINTS_MAX);
    }
}

#[test]
fn the_cost_of_stays_is_an_upper_bound() {
    let mut view = large("exact");
    view.stays.retain(|s| s.job < 40_000);
    let (gantt, _, cost) = gantt(&view, &mut Names::default(), GANTT_BUDGET_BYTES);
    assert!(matches!(gantt, Gantt::Stays { .. }));
    let names: usize = view.job_names[..40_000].iter().map(|n| n.len() + 3).sum();
    assert!(serde_json::to_string(&gantt).expect("JSON").len() + names <= cost);
}

#[test]
fn degenerate_runs_can_be_rendered() {
    assert!(render("t", &[]).contains("No runs to show"));
    let mut nothing = run("nothing");
    (nothing.gpus, nothing.end_s) = (0, f64::NAN);
    nothing.nodes.clear();
    nothing.queue.clear();
    nothing.busy = vec![(f64::NAN, 1.0), (1.0, f64::INFINITY)];
    nothing.jcts_s = vec![f64::NAN];
    nothing.figures = with_figure("x", "s", f64::NAN, Better::Lower).figures;
    let mut forever = run("forever");
    (forever.end_s, forever.stays[0].to_s) = (1e9, 1e9);
    forever.stays.push(Stay { job: 9, gpu: 0, from_s: 5.0, to_s: f64::NAN, sm_permille: 0 });
    forever.stays.push(Stay { job: 9, gpu: 0, from_s: 5.0, to_s: 5.0, sm_permille: 0 });
    let page = render("t", &[nothing, forever]);
    let data = embedded(&page);
    assert_eq!(data["runs"][0]["end_s"], 0);
    assert_eq!(data["runs"][1]["gantt"]["length"], serde_json::json!([0, 10_000_000]));
    assert!(!page.contains("NaN") && data["names"].to_string().contains("job 9"));
}

#[test]
fn the_same_runs_make_the_same_page() {
    assert_eq!(render("t", &[run("a"), run("b")]), render("t", &[run("a"), run("b")]));
}

#[test]
fn a_study_can_be_rendered() {
    use crate::trace::{Format, Trace, TraceJob, study};
    let mut job = TraceJob::new("a".into(), 0, 8, 100.0);
    job.team = Some("<b>team".into());
    let (format, first_dropped) = (Format::Roommate, Vec::new());
    let trace = Trace {
        jobs: vec![job],
        format,
        dropped: 0,
        first_dropped,
        origin_s: None,
        remarks: crate::trace::Remarks::new(),
    };
    let found = study::study(&trace, &study::Quotas::new());
    let page = super::study("<i>t.csv", &trace, &found);
    assert!(page.contains("&lt;b&gt;team") && !page.contains("<b>team") && !page.contains("<i>"));
    assert!(
        page.contains("3 of 14 tables") && page.contains("fig-run") && !page.contains("fig-wait")
    );
    assert!(page.contains("<code>queue_s</code>") && !page.contains("style=\""));
    assert_eq!(page, super::study("<i>t.csv", &trace, &found));
}
