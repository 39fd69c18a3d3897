//! Files of recorded requests, plain or gzip. The first line determines the layout:
//!
//! | first line | what it is |
//! |---|---|
//! | a number | requests in each second, one line a second (the Twitter series) |
//! | `at_s,rps` | requests a second from a time on |
//! | `time_s` | when each request came |
//! | `hour,mean_requests_per_hour` | a day (`BurstGPT`) |
//! | `TIMESTAMP,…` | calendar time of each request (Azure LLM 2023) |
//! | `app,func,end_timestamp,duration` | invocations (Azure Functions 2021) |
//! | `{"timestamp": …}` | JSON lines, milliseconds (Mooncake) |
//!
//! The time of the first of single requests is 0; after the last request and one mean gap they
//! repeat.

use super::csv::{self, Header, Row};
use super::error::{Bad, Problem, TraceError};
use super::field::{self, Unit};
use super::lines::Source;
use super::native::json_message;
use crate::serving::requests::Requests;
use serde::Deserialize;
use std::path::Path;
use std::sync::Arc;

/// Seconds averaged into one rate: one rate per second would be too many changes.
const SECONDS_TO_A_RATE: usize = 60;

/// Reads recorded requests.
pub fn read(path: &Path) -> Result<Requests, TraceError> {
    let mut source = Source::open(path, "file of requests")?;
    match source.first_byte() {
        b'{' => {
            let mut times = Vec::new();
            while source.next_line()? {
                let line = source.text().map_err(|p| source.error_here(p))?;
                let wrong = |e| source.error_here(Problem::Json(json_message(&e)));
                let Stamp { timestamp } = serde_json::from_str(line).map_err(wrong)?;
                let seconds = field::seconds(timestamp, Unit::Millis);
                times.push(seconds.map_err(|p| source.error_here(p))?);
            }
            from_times(&source, times)
        }
        b'0'..=b'9' => by_second(&mut source),
        _ => table(&mut source),
    }
}

#[derive(Deserialize)]
struct Stamp {
    timestamp: f64,
}

/// One number per line: the requests of that second.
fn by_second(source: &mut Source) -> Result<Requests, TraceError> {
    let mut sums = Vec::new();
    let mut seconds = 0;
    while source.next_line()? {
        let read = source.text().and_then(|t| field::parse(t.trim()));
        let count = read.and_then(|v| field::seconds(v, Unit::Seconds));
        let count = count.map_err(|p| source.error_here(p))?;
        if seconds % SECONDS_TO_A_RATE == 0 {
            sums.push(0.0);
        }
        *sums.last_mut().expect("a minute was begun") += count;
        seconds += 1;
    }
    let of_minute = |i: usize| (seconds - i * SECONDS_TO_A_RATE).min(SECONDS_TO_A_RATE) as f64;
    let rates = sums.iter().enumerate();
    let rates = rates.map(|(i, sum)| ((i * SECONDS_TO_A_RATE) as f64, sum / of_minute(i)));
    Ok(Requests::Rates { rates: rates.collect(), bursts: None })
}

/// The value of a row: the time of a request, or a time and the rate from then on.
type RowReader = Box<dyn Fn(&Row<'_>) -> Result<(f64, f64), Bad>>;

fn table(source: &mut Source) -> Result<Requests, TraceError> {
    let header = csv::header(source)?;
    let (is_rates, reader) = layout(&header).map_err(|p| source.error_here(p))?;
    let mut read = Vec::new();
    csv::rows(source, &header, ',', |source, row| {
        let row = row.map_err(Bad::from).and_then(&reader);
        read.push(row.map_err(|bad| source.error_here(bad))?);
        Ok(true)
    })?;
    if !is_rates {
        return from_times(source, read.into_iter().map(|r| r.0).collect());
    }
    if !read.is_sorted_by(|a, b| a.0 < b.0) || read.is_empty() {
        let problem = Problem::Columns("times of rates do not ascend".into());
        return Err(source.whole_file(problem));
    }
    let first = read[0].0;
    let rates: Arc<[(f64, f64)]> = read.into_iter().map(|(at, rps)| (at - first, rps)).collect();
    Ok(Requests::Rates { rates, bursts: None })
}

fn layout(header: &Header) -> Result<(bool, RowReader), Problem> {
    if header.has(&["at_s", "rps"]) {
        let [at, rps] = header.require(["at_s", "rps"])?;
        let rate = move |row: &Row<'_>| {
            Ok((row.seconds(at, Unit::Seconds)?, row.seconds(rps, Unit::Seconds)?))
        };
        Ok((true, Box::new(rate)))
    } else if header.has(&["hour", "mean_requests_per_hour"]) {
        let [hour, requests] = header.require(["hour", "mean_requests_per_hour"])?;
        let rate = move |row: &Row<'_>| {
            let (hour, n) = (row.number(hour)?, row.seconds(requests, Unit::Seconds)?);
            Ok((hour * 3_600.0, n / 3_600.0))
        };
        Ok((true, Box::new(rate)))
    } else if header.has(&["end_timestamp", "duration"]) {
        let [end, duration] = header.require(["end_timestamp", "duration"])?;
        let time =
            move |row: &Row<'_>| Ok(((row.number(end)? - row.number(duration)?).max(0.0), 0.0));
        Ok((false, Box::new(time)))
    } else if header.has(&["TIMESTAMP"]) {
        let [at] = header.require(["TIMESTAMP"])?;
        Ok((false, Box::new(move |row| Ok((row.with(at, calendar)?, 0.0)))))
    } else {
        let [at] = header.require(["time_s"])?;
        Ok((false, Box::new(move |row| Ok((row.seconds(at, Unit::Seconds)?, 0.0)))))
    }
}

/// `2023-11-16 18:17:03.9799600`: whole seconds from the calendar, plus a fraction.
fn calendar(text: &str) -> Result<f64, Problem> {
    let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
    let part = field::parse(&format!("0.{part}"))?;
    Ok(field::timestamp(whole)? as f64 + part)
}

fn from_times(source: &Source, mut times: Vec<f64>) -> Result<Requests, TraceError> {
    times.sort_by(f64::total_cmp);
    let (Some(first), Some(last)) = (times.first().copied(), times.last().copied()) else {
        return Err(source.whole_file(Problem::Empty));
    };
    times.iter_mut().for_each(|t| *t -= first);
    let span_s = last - first;
    let gap_s = if span_s > 0.0 { span_s / (times.len() - 1) as f64 } else { 1.0 };
    Ok(Requests::Times { period_s: span_s + gap_s, times: times.into() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn read_text(text: &str) -> Result<Requests, String> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        read(file.path()).map_err(|e| e.problem.to_string())
    }

    fn times(text: &str) -> (Vec<f64>, f64) {
        match read_text(text) {
            Ok(Requests::Times { times, period_s }) => (times.to_vec(), period_s),
            other => panic!("{other:?}"),
        }
    }

    fn rates(text: &str) -> Vec<(f64, f64)> {
        match read_text(text) {
            Ok(Requests::Rates { rates, bursts: None }) => rates.to_vec(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_layout_is_detected_from_its_first_line() {
        assert_eq!(times("time_s\n2\n1\n4\n"), (vec![0.0, 1.0, 3.0], 4.5));
        let azure = "TIMESTAMP,ContextTokens\n2023-11-16 18:17:03.5,1\n2023-11-16 18:17:05.0,2\n";
        assert_eq!(times(azure), (vec![0.0, 1.5], 3.0));
        let functions = "app,func,end_timestamp,duration\na,b,3.0,1.0\na,b,5.5,3.0\n";
        assert_eq!(times(functions), (vec![0.0, 0.5], 1.0));
        let mooncake = "{\"timestamp\": 0, \"x\": 1}\n{\"timestamp\": 250}\n";
        assert_eq!(times(mooncake), (vec![0.0, 0.25], 0.5));
        assert_eq!(rates("at_s,rps\n0,5\n10,0\n"), [(0.0, 5.0), (10.0, 0.0)]);
        assert_eq!(
            rates("hour,mean_requests_per_hour\n0,7200\n1,3600\n"),
            [(0.0, 2.0), (3_600.0, 1.0)]
        );
        let seconds: String = (0..90).map(|s| if s < 60 { "4\n" } else { "6\n" }).collect();
        assert_eq!(rates(&seconds), [(0.0, 4.0), (60.0, 6.0)]);
    }

    #[test]
    fn errors_name_the_problem() {
        assert_eq!(read_text("4\nx\n").unwrap_err(), "expected a number, found \"x\"");
        assert!(read_text("a,b\n1,2\n").unwrap_err().contains("time_s"));
        assert!(read_text("at_s,rps\n5,1\n5,2\n").unwrap_err().contains("ascend"));
    }
}
