//! The study over two dozen jobs, by eye.

use super::*;
use crate::trace::{Observed, Status};
use expect_test::expect;

fn trace(jobs: Vec<TraceJob>) -> Trace {
    let (format, first_dropped) = (Format::Roommate, Vec::new());
    Trace { jobs, format, dropped: 0, first_dropped, origin_s: None, cpu_jobs: 0 }
}

/// Of everything something: sizes, teams, spreads, ends.
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
fn a_trace_with_everything_answers_every_table() {
    let study = study(&sample(), &Quotas::new());
    assert!(study.tables.iter().all(|table| table.missing.is_empty() && !table.rows.is_empty()));
    let text = study.to_string();
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    expect![[r#"
        24 jobs, 111 GPU-hours, roommate trace

        Run time by job size
          GPUs  jobs  of jobs  of GPU time     p50     p90     p95    mean
          1        8   33.3 %        2.1 %  13 min  33 min  33 min  18 min
          2-4      4   16.7 %        4.8 %  15 min  35 min  35 min  20 min
          5-8      4   16.7 %       10.4 %  17 min  37 min  37 min  22 min
          >8       8   33.3 %       82.6 %  20 min  40 min  40 min  24 min
          all     24  100.0 %      100.0 %  20 min  37 min  38 min  21 min

        Job sizes
          GPUs         jobs  of jobs  of GPU time
          1               8   33.3 %        2.1 %
          4               4   16.7 %        4.8 %
          8               4   16.7 %       10.4 %
          16              4   16.7 %       22.5 %
          32 and more     4   16.7 %       60.2 %
          all            24  100.0 %      100.0 %

        Virtual clusters
          team  jobs  of jobs  of GPU time  run p50
          vc1     12   50.0 %       71.7 %   20 min
          vc0     12   50.0 %       28.3 %   18 min
          all     24  100.0 %      100.0 %   20 min

        Queueing delay by job size
          GPUs  jobs      p50      p90      p95     mean  over 1 min  over 10 min
          1        8     49 s  6.0 min  6.0 min  2.3 min      50.0 %        0.0 %
          2-4      4  1.1 min  6.7 min  6.7 min  2.8 min      75.0 %        0.0 %
          5-8      4  1.4 min  7.3 min  7.3 min  3.1 min      75.0 %        0.0 %
          >8       8  2.0 min  8.8 min  8.8 min  3.8 min      75.0 %        0.0 %
          all     24  2.0 min  7.3 min  8.1 min  3.0 min      66.7 %        0.0 %

        Queueing delay by virtual cluster
          team  jobs      p50      p90      p95     mean  over 1 min  over 10 min
          vc1     12  2.0 min  7.3 min  8.8 min  3.2 min      66.7 %        0.0 %
          vc0     12  1.7 min  6.7 min  8.1 min  2.8 min      66.7 %        0.0 %
          all     24  2.0 min  7.3 min  8.1 min  3.0 min      66.7 %        0.0 %

        Causes of delay by job size
          GPUs  delayed jobs  fair share  fragmentation  of time: fair share  fragmentation
          1                4     100.0 %          0.0 %              100.0 %          0.0 %
          2-4              3       0.0 %        100.0 %               25.0 %         75.0 %
          5-8              3       0.0 %        100.0 %               12.5 %         87.5 %
          >8               6       0.0 %        100.0 %                4.3 %         95.7 %
          all             16      25.0 %         75.0 %               31.8 %         68.2 %

        Causes of delay by virtual cluster
          team  delayed jobs  fair share  fragmentation  of time: fair share  fragmentation
          vc1              8      25.0 %         75.0 %               29.2 %         70.8 %
          vc0              8      25.0 %         75.0 %               34.8 %         65.2 %
          all             16      25.0 %         75.0 %               31.8 %         68.2 %

        Queueing delay by machines that a job was spread over
          GPUs on machines  jobs      p50      p90      p95     mean  over 1 min  over 10 min
          2-4 on 1             2    4.0 s  1.1 min  1.1 min     34 s      50.0 %        0.0 %
          2-4 on 2             2  3.3 min  6.7 min  6.7 min  5.0 min     100.0 %        0.0 %
          5-8 on 1             2    9.0 s  1.4 min  1.4 min     45 s      50.0 %        0.0 %
          5-8 on 2             2  3.8 min  7.3 min  7.3 min  5.5 min     100.0 %        0.0 %
          >8 on 2              2     16 s  1.7 min  1.7 min     58 s      50.0 %        0.0 %
          >8 on 3-4            2  4.3 min  8.1 min  8.1 min  6.2 min     100.0 %        0.0 %
          >8 on 5-8            2     25 s  2.0 min  2.0 min  1.2 min      50.0 %        0.0 %
          >8 on 9-16           2  4.8 min  8.8 min  8.8 min  6.8 min     100.0 %        0.0 %

        Utilisation of GPUs by job size and outcome, weighted by GPU time
          GPUs         jobs  passed  killed  unsuccessful     all
          1               8  43.5 %  44.1 %             -  43.8 %
          4               4       -       -        44.8 %  44.8 %
          8               4  45.5 %       -             -  45.5 %
          16              4       -  46.2 %             -  46.2 %
          32 and more     4       -       -        47.0 %  47.0 %
          all            24  45.3 %  46.1 %        46.8 %  46.5 %

        Utilisation of GPUs by machines that a job was spread over
          GPUs on machines  jobs    mean     p50     p90     p95
          4 on 1               2  36.5 %  32.0 %  38.0 %  38.0 %
          4 on 2               2  47.5 %  44.0 %  50.0 %  50.0 %
          8 on 1               2  37.3 %  33.0 %  39.0 %  39.0 %
          8 on 2               2  48.5 %  45.0 %  51.0 %  51.0 %
          16 on 2              2  38.1 %  34.0 %  40.0 %  40.0 %
          16 on 4              2  49.5 %  46.0 %  52.0 %  52.0 %

        Outcome of jobs
          outcome       jobs  of jobs  of GPU time  run p50  attempts  retried
          passed           8   33.3 %       11.4 %   17 min      1.00    0.0 %
          killed           8   33.3 %       23.6 %   18 min      1.00    0.0 %
          unsuccessful     8   33.3 %       65.0 %   20 min      3.00  100.0 %
          all             24  100.0 %      100.0 %   20 min      1.67   33.3 %

        Outcome and retries by job size
          GPUs         jobs   passed   killed  unsuccessful  unknown  attempts  retried
          1               8   50.0 %   50.0 %         0.0 %    0.0 %      1.00    0.0 %
          4               4    0.0 %    0.0 %       100.0 %    0.0 %      3.00  100.0 %
          8               4  100.0 %    0.0 %         0.0 %    0.0 %      1.00    0.0 %
          16              4    0.0 %  100.0 %         0.0 %    0.0 %      1.00    0.0 %
          32 and more     4    0.0 %    0.0 %       100.0 %    0.0 %      3.00  100.0 %
          all            24   33.3 %   33.3 %        33.3 %    0.0 %      1.67   33.3 %

        Attempts
          attempts  jobs  of jobs  of GPU time  passed  killed  unsuccessful
          1           16   66.7 %       35.0 %  50.0 %  50.0 %         0.0 %
          3            8   33.3 %       65.0 %   0.0 %   0.0 %       100.0 %
          all         24  100.0 %      100.0 %  33.3 %  33.3 %        33.3 %

        Reasons of failures, time to failure as the mean of a job's attempts
          reason      trials  jobs  users      p50     p90     p95  of GPU time
          bad, input      24     8      5  6.7 min  13 min  13 min      100.0 %
          all             24     8      5  6.7 min  13 min  13 min      100.0 %
          without 16 jobs of which something is not known
    "#]]
    .assert_eq(&text);
}

#[test]
fn a_trace_with_nothing_says_what_it_lacks() {
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
fn a_wait_has_one_cause_at_a_time() {
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
    // Without an end they are a row of their own.
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
