//! Single fields of a row: numbers, durations and times, with their limits.

use super::error::Problem;
use std::borrow::Cow;

/// Largest time in a trace, in seconds: 100 years. The limit also keeps whole microseconds exact:
/// below 2^32 s the rounding errors of the decimal and of the product together stay under half a
/// microsecond.
pub(super) const MAX_S: f64 = 100.0 * 365.25 * 86_400.0;

/// Most GPUs of one job.
pub(super) const MAX_GPUS: u32 = 65_535;

/// Most steps of one job; above it a double cannot count single steps.
const MAX_STEPS: f64 = 1e15;

/// The unit in which a trace writes its times.
#[derive(Clone, Copy)]
pub(super) enum Unit {
    Millis,
    Seconds,
    Minutes,
}

impl Unit {
    fn seconds(self, value: f64) -> f64 {
        match self {
            Unit::Millis => value / 1e3,
            Unit::Seconds => value,
            Unit::Minutes => value * 60.0,
        }
    }

    fn micros(self, value: f64) -> f64 {
        match self {
            Unit::Millis => value * 1e3,
            Unit::Seconds => value * 1e6,
            Unit::Minutes => value * 6e7,
        }
    }
}

/// Parses a number without checking limits.
pub(super) fn parse(text: &str) -> Result<f64, Problem> {
    text.trim().parse().map_err(|_| Problem::expected("a number", text.trim()))
}

fn wrong<T>(expected: impl Into<Cow<'static, str>>, value: f64) -> Result<T, Problem> {
    Err(Problem::expected(expected, &value.to_string()))
}

/// A finite number that is not negative.
pub(super) fn number(value: f64) -> Result<f64, Problem> {
    if !value.is_finite() {
        return wrong("a finite number", value);
    }
    if value < 0.0 {
        return wrong("a number of at least 0", value);
    }
    // Turns -0 into 0, so that equal jobs also print equally.
    Ok(value + 0.0)
}

/// A whole number up to `max`. `8.0` is accepted, since Pandas writes whole columns so once one row
/// is empty.
pub(super) fn whole(value: f64, max: u32) -> Result<u32, Problem> {
    let value = number(value)?;
    if value.fract() != 0.0 {
        return wrong("a whole number", value);
    }
    if value > f64::from(max) {
        return wrong(format!("at most {max}"), value);
    }
    Ok(value as u32)
}

/// A number of GPUs: at least one.
pub(super) fn gpus(value: f64) -> Result<u32, Problem> {
    match whole(value, MAX_GPUS)? {
        0 => wrong("at least 1 GPU", value),
        gpus => Ok(gpus),
    }
}

/// The most GPUs that a job can use: at least the GPUs that it needs.
pub(super) fn gpus_max(value: f64, gpus: u32) -> Result<u32, Problem> {
    match whole(value, MAX_GPUS)? {
        max if max < gpus => wrong(format!("at least the {gpus} GPUs that it needs"), value),
        max => Ok(max),
    }
}

/// The scaling exponent of an elastic job; with 2, twice the GPUs are four times as fast.
pub(super) fn scaling(value: f64) -> Result<f64, Problem> {
    if number(value)? > 2.0 { wrong("0 to 2", value) } else { number(value) }
}

/// A share of a GPU in thousandths.
pub(super) fn gpu_milli(value: f64) -> Result<u32, Problem> {
    match whole(value, 1000)? {
        0 => wrong("at least 1 thousandth of a GPU", value),
        milli => Ok(milli),
    }
}

/// A share from 0 to 1.
pub(super) fn share(value: f64) -> Result<f64, Problem> {
    if number(value)? > 1.0 { wrong("a share from 0 to 1", value) } else { number(value) }
}

/// A count of training steps.
pub(super) fn steps(value: f64) -> Result<f64, Problem> {
    if number(value)? > MAX_STEPS {
        return wrong("at most 1e15 steps", value);
    }
    number(value)
}

/// A duration in seconds.
pub(super) fn seconds(value: f64, unit: Unit) -> Result<f64, Problem> {
    let seconds = unit.seconds(number(value)?);
    if seconds > MAX_S { wrong("at most 100 years", value) } else { Ok(seconds) }
}

/// A duration above 0, for use as a divisor.
pub(super) fn positive_seconds(value: f64, unit: Unit) -> Result<f64, Problem> {
    let seconds = seconds(value, unit)?;
    if seconds > 0.0 { Ok(seconds) } else { wrong("a time above 0", value) }
}

/// A time, to the nearest microsecond.
pub(super) fn micros(value: f64, unit: Unit) -> Result<u64, Problem> {
    seconds(value, unit)?;
    Ok(unit.micros(value).round() as u64)
}

/// `YYYY-MM-DD HH:MM:SS` (also with `T`, a fraction or a trailing `Z`) in seconds since 1970 of a
/// clock without time zone. The files give no zone, and only differences matter.
pub(super) fn timestamp(text: &str) -> Result<u64, Problem> {
    let text = text.trim();
    parse_timestamp(text)
        .ok_or_else(|| Problem::expected("a time like 2020-04-01 12:30:00 (1970 to 2069)", text))
}

/// The same in microseconds.
pub(super) fn timestamp_us(text: &str) -> Result<u64, Problem> {
    timestamp(text).map(|s| s * 1_000_000)
}

fn parse_timestamp(text: &str) -> Option<u64> {
    let (text, tail) = text.split_at_checked(19)?;
    let fraction = tail.strip_suffix('Z').unwrap_or(tail);
    let fraction_ok = fraction.is_empty()
        || fraction.strip_prefix('.').is_some_and(|f| f.bytes().all(|b| b.is_ascii_digit()));
    let bytes = text.as_bytes();
    let marks_ok = bytes[4] == b'-'
        && bytes[7] == b'-'
        && matches!(bytes[10], b' ' | b'T')
        && bytes[13] == b':'
        && bytes[16] == b':';
    if !fraction_ok || !marks_ok {
        return None;
    }
    let digits = |from: usize, to: usize| {
        bytes[from..to]
            .iter()
            .try_fold(0u64, |sum, b| b.is_ascii_digit().then(|| sum * 10 + u64::from(b - b'0')))
    };
    let (year, month, day) = (digits(0, 4)?, digits(5, 7)?, digits(8, 10)?);
    let (hour, minute, second) = (digits(11, 13)?, digits(14, 16)?, digits(17, 19)?);
    if hour > 23 || minute > 59 || second > 59 {
        return None;
    }
    Some(days_since_1970(year, month, day)? * 86_400 + hour * 3_600 + minute * 60 + second)
}

/// Days since 1970-01-01 in the Gregorian calendar; `None` outside 1970 to 2069, a range that keeps
/// every difference below [`MAX_S`].
fn days_since_1970(year: u64, month: u64, day: u64) -> Option<u64> {
    const BEFORE: [u64; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
    if !(1970..2070).contains(&year) || !(1..=12).contains(&month) || day == 0 {
        return None;
    }
    // 2000 is the only century year in the range, so every fourth year is a leap year.
    let leap = u64::from(year.is_multiple_of(4));
    let before = |month: u64| BEFORE[month as usize - 1] + if month > 2 { leap } else { 0 };
    let length = if month == 12 { 31 } else { before(month + 1) - before(month) };
    // February's day 29 sits before March 1, which `before(3)` already counts.
    if day > length {
        return None;
    }
    let leaps_before = (year - 1969) / 4;
    Some((year - 1970) * 365 + leaps_before + before(month) + day - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_calendar_is_gregorian() {
        assert_eq!(timestamp("1970-01-01 00:00:00"), Ok(0));
        assert_eq!(timestamp("2000-02-29 00:00:00"), Ok(951_782_400));
        assert_eq!(timestamp("2017-10-07T01:11:39"), Ok(1_507_338_699));
        assert_eq!(timestamp("2020-12-31 23:59:59.250Z"), Ok(1_609_459_199));
        for wrong in [
            "",
            "-",
            "2017-02-29 00:00:00",
            "2017-04-31 00:00:00",
            "2017-13-01 00:00:00",
            "2017-01-00 00:00:00",
            "2017-01-01 24:00:00",
            "1969-12-31 23:59:59",
            "2070-01-01 00:00:00",
            "2017-01-01 00:00:0x",
            "2017-01-01 00:00:00 PM",
            "2017-01-01 00:00:0é",
        ] {
            assert!(timestamp(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_day_follows_the_one_before() {
        let mut expected = 0;
        for year in 1970..2070 {
            for month in 1..=12 {
                for day in 1..=31 {
                    if let Some(days) = days_since_1970(year, month, day) {
                        assert_eq!(days, expected, "{year}-{month}-{day}");
                        expected += 1;
                    }
                }
            }
        }
        assert_eq!(expected, 100 * 365 + 25);
    }

    #[test]
    fn numbers_have_limits() {
        let number = |text| parse(text).and_then(number);
        assert_eq!(number(" 1.5 "), Ok(1.5));
        assert!(number("-0").unwrap().is_sign_positive());
        for wrong in ["", "x", "NaN", "inf", "-1", "1e999", "0x10", "1,5"] {
            assert!(number(wrong).is_err(), "{wrong}");
        }
        assert_eq!(gpus(8.0), Ok(8));
        assert!(gpus(0.0).is_err() && gpus(65_536.0).is_err() && gpus(1.5).is_err());
        assert_eq!(micros(1.000_000_5, Unit::Minutes), Ok(60_000_030));
        assert!(micros(3_155_760_001.0, Unit::Seconds).is_err());
    }
}
