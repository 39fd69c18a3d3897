//! The study over two dozen jobs, compared with expected text.

use super::*;
use crate::trace::{Observed, Status};
use expect_test::expect;

fn trace(jobs: Vec<TraceJob>) -> Trace {
    let (format, first_dropped) = (Format::Roommate, Vec::new());
    Trace {
        jobs,
        format,
        dropped: 0,
        first_dropped,
        origin_s: None,
        remarks: crate::trace::Remarks::new(),
    }
}

/// A sample with several sizes, teams, numbers of machines and final states.
fn sample() -> Trace {
    let job = |i: u32| {
        let gpus = [1u32, 1, 4, 8, 16, 40][i as usize % 6];
        let status = Status::ALL[i as usize % 3];
        let failed = status == Status::Failed;
        let queue_s = f64::from(i * i);
        TraceJob {
            team: Some(format!("vc{}", i % 2)),
            user: Some(format!("u{}", i % 5)),
            status: Some(status),
            queue_s: Some(queue_s),
            attempts: if failed { 3 } else { 1 },
            observed: Observed {
                machines: gpus.div_ceil(8) * (1 + i / 12),
                gpu_util: Some(f64::from(30 + i) / 100.0),
                fair_share_s: Some(queue_s / f64::from(gpus)),
                failure: failed.then(|| "bad, input".into()),
            }
            .boxed(),
            ..TraceJob::new(
                i.to_string(),
                u64::from(i) * 60_000_000,
                gpus,
                f64::from(i + 1) * 100.0,
            )
        }
    };
    trace((0..24).map(job).collect())
}

#[test]
fn a_complete_trace_fills_every_table() {
    let study = study(&sample(), &Quotas::new());
    assert!(study.tables.iter().all(|table| table.missing.is_empty() && !table.rows.is_empty()));
    let text = study.to_string();
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
}

#[test]
fn missing_columns_are_listed() {
    let study = study(&trace(vec![TraceJob::new("a".into(), 0, 8, 10.0)]), &Quotas::new());
    let lacks: Vec<String> = study
        .tables
        .iter()
        .map(|table| format!("{}: {}\n", table.id, table.missing.join(", ")))
        .collect();
    expect![[r#"
        run_time: 
        sizes: 
        teams: team
        queueing_by_size: queue_s
        queueing_by_team: queue_s, team
        causes_by_size: queue_s, fair_share_s (or team and --quota)
        causes_by_team: queue_s, fair_share_s (or team and --quota), team
        queueing_by_locality: queue_s, machines
        utilisation: gpu_util, status
        utilisation_by_locality: gpu_util, machines
        outcomes: status
        outcomes_by_size: status
        retries: attempts, status
        failures: failure
    "#]]
    .assert_eq(&lacks.concat());
    assert!(study.csv().contains("outcomes,,missing,status\n"));
}

#[test]
fn a_delay_has_one_cause_at_a_time() {
    let study = study(&sample(), &Quotas::new());
    for table in ["causes_by_size", "causes_by_team"].map(|id| study.table(id).unwrap()) {
        for row in &table.rows {
            for (fair, rest) in
                [("fair_share", "fragmentation"), ("fair_share_time", "fragmentation_time")]
            {
                let part = |key| table.value(&row.name, key);
                let (Some(fair), Some(rest)) = (part(fair), part(rest)) else { continue };
                assert!((fair + rest - 1.0).abs() < 1e-12, "{} {fair} {rest}", row.name);
            }
        }
    }
}

#[test]
fn jobs_without_a_value_are_left_out_and_counted() {
    let mut trace = sample();
    trace.jobs[3].queue_s = None;
    trace.jobs[4].observed = None;
    let study = study(&trace, &Quotas::new());
    let left_out = |id| study.table(id).unwrap().left_out;
    assert_eq!((left_out("queueing_by_size"), left_out("utilisation")), (1, 1));
    // Jobs without a final state have a row of their own.
    trace.jobs[0].status = None;
    let study = super::study(&trace, &Quotas::new());
    assert_eq!(study.table("outcomes").unwrap().value("unknown", "jobs"), Some(1.0));
}

#[test]
fn one_value_is_one_line_of_csv() {
    let study = study(&sample(), &Quotas::new());
    let csv = study.csv();
    assert!(csv.contains("\nfailures,\"bad, input\",trials,24\n"), "{csv}");
    let json = serde_json::to_value(&study).unwrap();
    assert_eq!(json["tables"][13]["rows"][0]["trials"], 24.0);
}
