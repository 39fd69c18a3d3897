//! Reads the public traces in `../shared`. They are not part of the repository, so without them
//! this test prints that it is skipped and passes, unless `ROOMMATE_REQUIRE_SHARED=1`.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "this is a test")]

mod shared;

use roommate_sim::serving::requests::Requests;
use roommate_sim::trace::study::{Quotas, Study, study};
use roommate_sim::trace::{
    Format, ReadOptions, Trace, TraceClass, native, read, recorded, stats::stats,
};
use shared::shared;
use std::path::Path;

fn read_strictly(path: &Path) -> Trace {
    read(path, &ReadOptions::default()).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn every_public_trace_has_its_jobs() {
    let Some(shared) = shared() else { return };
    for (path, format, jobs) in [
        ("traces/philly/philly_jobs.csv.gz", Format::Philly, 82_247),
        ("traces/philly/philly_all_status_sample1000.csv.gz", Format::Philly, 1_000),
        ("traces/philly/cluster_job_log_example.json", Format::Philly, 1),
        ("traces/helios/venus_gpu_jobs.csv.gz", Format::Helios, 125_303),
        ("traces/alibaba_pai_2020/pai_gpu_tasks_sample.csv.gz", Format::Pai, 60_105),
        ("traces/muri/trace1.csv.gz", Format::Muri, 1_494),
        ("traces/muri/trace2.csv.gz", Format::Muri, 5_755),
        ("traces/muri/trace3.csv.gz", Format::Muri, 992),
        ("traces/muri/trace4.csv.gz", Format::Muri, 2_638),
        ("traces/muri/cluster_trace.csv.gz", Format::Muri, 400),
        ("anchors/muri/trace1.csv", Format::Muri, 1_494),
        ("traces/tiresias/60_job.csv", Format::Tiresias, 60),
        ("traces/elasticflow/philly_103959.csv.gz", Format::ElasticFlow, 876),
    ] {
        let trace = read_strictly(&shared.join(path));
        assert_eq!((trace.format, trace.jobs.len()), (format, jobs), "{path}");
        let text = stats(&trace, Some(64)).to_string();
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{path}\n{text}");
    }
}

#[test]
fn every_public_file_of_requests_has_its_requests() {
    let Some(shared) = shared() else { return };
    for (path, requests) in [
        ("azure_functions_2021/azure2021_first199.csv.gz", 199),
        ("azure_llm_2023/AzureLLMInferenceTrace_code.csv.gz", 8_819),
        ("azure_llm_2023/AzureLLMInferenceTrace_conv.csv.gz", 19_366),
        ("mooncake/arxiv_trace_first1000.jsonl.gz", 1_000),
        ("mooncake/conversation_trace.jsonl.gz", 12_031),
        ("mooncake/synthetic_trace.jsonl.gz", 3_993),
    ] {
        let read = recorded::read(&shared.join("traces").join(path)).unwrap();
        let Requests::Times { times, period_s } = read else { panic!("{path}: rates") };
        assert_eq!(times.len(), requests, "{path}");
        assert!(times.is_sorted() && times[0] == 0.0, "{path}");
        assert!(times[requests - 1] <= period_s, "{path}");
    }
    // 22 days by the minute, and one by the hour: the mean request rates match the files.
    for (path, rates, mean_rps) in [
        ("twitter/requests_per_second.txt.gz", 1_899_061_usize.div_ceil(60), 63.597),
        ("burstgpt/mean_requests_by_hour_of_day.csv", 24, 0.2713),
    ] {
        let read = recorded::read(&shared.join("traces").join(path)).unwrap();
        let Requests::Rates { rates: found, .. } = read else { panic!("{path}: times") };
        assert_eq!(found.len(), rates, "{path}");
        let mean = found.iter().map(|r| r.1).sum::<f64>() / rates as f64;
        assert!((mean / mean_rps - 1.0).abs() < 0.01, "{path}: {mean}");
    }
}

#[test]
fn chronus_has_rows_without_gpus() {
    let Some(shared) = shared() else { return };
    for (file, dropped) in [("philly_mix2", 194), ("philly_slo", 205)] {
        let path = shared.join(format!("traces/chronus/{file}.csv.gz"));
        let error = read(&path, &ReadOptions::default()).unwrap_err();
        assert_eq!(error.column, Some("num_gpu"));
        let skip = ReadOptions { skip_bad_rows: true, ..ReadOptions::default() };
        let trace = read(&path, &skip).unwrap();
        assert_eq!(
            (trace.format, trace.jobs.len() as u64, trace.dropped),
            (Format::Chronus, 30_940 - dropped, dropped)
        );
        let late = |job: &&_| -> bool { has_early_deadline(job) };
        assert_eq!(
            trace.jobs.iter().filter(late).count(),
            0,
            "a deadline before its job could end"
        );
    }
}

/// A deadline that even an empty cluster could not meet; Chronus' generator makes none.
fn has_early_deadline(job: &roommate_sim::trace::TraceJob) -> bool {
    job.class == TraceClass::Guaranteed
        && job.deadline_us.is_none_or(|at| at < job.submit_us + (job.duration_s * 1e6) as u64)
}

#[test]
fn gavel_jobs_get_their_speed_from_the_table() {
    let Some(shared) = shared() else { return };
    let options = |table: &str| ReadOptions {
        throughputs: Some(shared.join(table)),
        skip_bad_rows: true,
        ..ReadOptions::default()
    };
    for (path, table, jobs) in [
        ("anchors/gavel/small_test.csv", "anchors/gavel/throughputs_physical.csv.gz", 20),
        ("anchors/gavel/max_min_fairness.csv", "anchors/gavel/throughputs_physical.csv.gz", 96),
        (
            "anchors/gavel/generated_single_lam900_seed0.csv.gz",
            "anchors/gavel/throughputs_simulation.csv.gz",
            8_000,
        ),
        (
            "traces/gavel/msr_vc_0e4a51_seed0.trace.gz",
            "traces/gavel/throughput_isolated_simulation.csv.gz",
            984,
        ),
    ] {
        let trace = read(&shared.join(path), &options(table)).unwrap();
        assert_eq!((trace.format, trace.jobs.len()), (Format::Gavel, jobs), "{path}");
    }
    // The completion time that the original reports for a job that starts at once on V100s.
    let table = options("anchors/gavel/throughputs_physical.csv.gz");
    let small = read(&shared.join("anchors/gavel/small_test.csv"), &table).unwrap();
    assert!((small.jobs[0].duration_s - 34.362).abs() < 1e-3, "{}", small.jobs[0].duration_s);
}

#[test]
fn real_traces_round_trip_through_our_format() {
    let Some(shared) = shared() else { return };
    let trace = read_strictly(&shared.join("traces/muri/trace2.csv.gz"));
    let mut file = tempfile::NamedTempFile::new().unwrap();
    native::write_csv(&mut file, &trace.jobs).unwrap();
    assert_eq!(read_strictly(file.path()).jobs, trace.jobs);
}

/// The published group times and efficiencies, to half of the last printed digit.
#[test]
fn group_times_match_the_published_model() {
    use roommate_core::interference::stages::{INFLATION, Stages, seat};
    let Some(shared) = shared() else { return };
    let table = |file: &str| {
        let text = std::fs::read_to_string(shared.join("anchors/muri").join(file)).unwrap();
        let rows: Vec<Vec<String>> =
            text.lines().map(|l| l.split(',').map(str::to_owned).collect()).collect();
        rows
    };
    let number = |s: &str| s.parse::<f64>().unwrap();
    let profiles = table("model_stage_profiles.csv");
    let profile = |model: &str, gpus: &str| -> (f64, Stages) {
        let row = profiles.iter().find(|r| r[0] == model && r[1] == gpus).unwrap();
        (number(&row[3]) * 1.015, [number(&row[4]), number(&row[5]), number(&row[6])])
    };
    let mut checked = 0;
    for row in table("group_time_vectors.csv").iter().skip(1) {
        let members: Vec<(f64, Stages)> = row[2].split('+').map(|m| profile(m, &row[0])).collect();
        let stages: Vec<Stages> = members.iter().map(|m| m.1).collect();
        let best = seat(&stages, false).step_s;
        let inflated = best * INFLATION[stages.len() - 2];
        let busy = stages.iter().fold(0.0, |sum, s| sum + ((s[0] + s[1]) + s[2]));
        let alone: f64 = members.iter().map(|m| m.0).sum();
        let speeds: f64 = members.iter().map(|m| m.0 / inflated).sum();
        let close = |ours: f64, column: usize, half_digit: f64| {
            let expected = number(&row[column]);
            assert!((ours - expected).abs() <= half_digit * 1.001, "{row:?}: {ours} at {column}");
        };
        close(best, 3, 5e-7);
        close(inflated, 4, 5e-7);
        close(seat(&stages, true).step_s, 5, 5e-7);
        close(busy / (inflated * 4.0), 6, 5e-10);
        close(alone, 7, 5e-7);
        assert_eq!(row[8] == "1", inflated / alone > 1.0, "{row:?}");
        close(speeds, 9, 5e-7);
        checked += 1;
    }
    assert_eq!(checked, 64);
}

/// Checks figures of the Philly study's specification that the public files can answer: table, row,
/// column, the figure, and half of its last digit (or more, where the file is another population).
fn assert_figures(found: &Study, figures: &[(&str, &str, &str, f64, f64)]) {
    for (table, row, column, expected, within) in figures {
        let value = found.table(table).and_then(|t| t.value(row, column));
        let close = value.is_some_and(|value| (value - expected).abs() <= *within);
        assert!(close, "{table} {row} {column}: {value:?} instead of {expected} ± {within}");
    }
}

#[test]
fn completed_philly_jobs_match_the_specification() {
    let Some(shared) = shared() else { return };
    let trace = read_strictly(&shared.join("traces/philly/philly_jobs.csv.gz"));
    let found = study(&trace, &Quotas::new());
    assert_figures(
        &found,
        &[
            ("sizes", "1", "of_jobs", 0.932, 5e-4),
            ("sizes", "2", "of_jobs", 0.022, 5e-4),
            ("sizes", "4", "of_jobs", 0.023, 5e-4),
            ("sizes", "8", "of_jobs", 0.020, 5e-4),
            ("sizes", "16", "of_jobs", 0.0024, 5e-5),
            ("sizes", "32 and more", "of_jobs", 0.0009, 5e-5),
            ("sizes", "8", "of_gpu_time", 0.484, 5e-4),
            ("sizes", "1", "of_gpu_time", 0.181, 5e-4),
            ("sizes", "4", "of_gpu_time", 0.167, 5e-4),
            ("sizes", "16", "of_gpu_time", 0.115, 5e-4),
            ("run_time", "all", "p50_s", 1_144.0, 0.5),
            // Ours are nearest ranks; the specification interpolates.
            ("run_time", "all", "p90_s", 11_265.0, 1.0),
            ("run_time", "all", "p95_s", 43_646.0, 2.0),
            ("teams", "6214e9", "of_jobs", 0.50, 5e-3),
        ],
    );
    // The file has only completed jobs without queueing, machines and utilisation, so other tables
    // are unanswered.
    let answered: Vec<&str> =
        found.tables.iter().filter(|t| t.missing.is_empty()).map(|t| t.id).collect();
    assert_eq!(answered, ["run_time", "sizes", "teams"]);
    let lacks = |id| found.table(id).unwrap().missing.clone();
    assert_eq!(lacks("queueing_by_size"), ["queue_s"]);
    assert_eq!(lacks("utilisation"), ["gpu_util", "status"]);
}

#[test]
fn wide_philly_jobs_complete_less_often() {
    let Some(shared) = shared() else { return };
    let trace = read_strictly(&shared.join("traces/philly/philly_all_status_sample1000.csv.gz"));
    let found = study(&trace, &Quotas::new());
    assert_figures(
        &found,
        &[
            ("outcomes_by_size", "1", "passed", 1.0 - 0.19, 5e-3),
            ("outcomes_by_size", "4", "passed", 1.0 - 0.61, 5e-3),
            ("outcomes_by_size", "8", "passed", 1.0 - 0.81, 5e-3),
            // Published over 96,260 jobs; the sample has 1,000, none above 8 GPUs, and only a
            // substitute for the status.
            ("outcomes", "passed", "of_jobs", 0.693, 0.06),
        ],
    );
    let killed = found.table("outcomes_by_size").unwrap().value("8", "killed");
    assert_eq!(killed, None, "the file does not say which jobs were killed");
}

#[test]
fn one_record_of_the_philly_log_fills_its_tables() {
    let Some(shared) = shared() else { return };
    let trace = read_strictly(&shared.join("traces/philly/cluster_job_log_example.json"));
    let quotas = Quotas::from([("ee9e8c".into(), 8)]);
    assert_figures(
        &study(&trace, &quotas),
        &[
            ("queueing_by_size", "5-8", "p50_s", 30.0, 0.0),
            ("queueing_by_locality", "5-8 on 1", "jobs", 1.0, 0.0),
            ("causes_by_team", "ee9e8c", "delayed", 0.0, 0.0),
            ("outcomes", "passed", "mean_attempts", 2.0, 0.0),
        ],
    );
}
