//! Formats numbers and escapes text for the report.

/// Longest name that is embedded, in characters; the middle of a longer one is left out.
pub(super) const NAME_MAX_CHARS: usize = 160;

/// Text made safe for HTML content and for quoted attributes.
pub(super) fn html(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // Control characters are parse errors in HTML.
            c if c.is_control() && c != '\n' && c != '\t' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// JSON made safe inside a `<script>` element: without a `<` neither `</script` nor `<!--` can
/// occur. In JSON a `<` occurs only inside a string, where `\u003c` is equivalent.
pub(super) fn script_safe(json: &str) -> String {
    json.replace('<', "\\u003c")
}

/// A name of bounded length; its end is kept, because generated names differ there.
pub(super) fn clip(name: &str) -> String {
    let count = name.chars().count();
    if count <= NAME_MAX_CHARS {
        return name.to_owned();
    }
    let tail = NAME_MAX_CHARS / 3;
    let head = NAME_MAX_CHARS - tail - 1;
    let mut out: String = name.chars().take(head).collect();
    out.push('…');
    out.extend(name.chars().skip(count - tail));
    out
}

/// A duration in at most two units: `2 h 14 m`.
pub(super) fn duration(seconds: f64) -> String {
    duration_in(seconds, 2)
}

/// Seconds in at most `units` units, from days to seconds; shorter ones with decimals.
pub(super) fn duration_in(seconds: f64, units: usize) -> String {
    const UNITS: [(f64, &str); 4] = [(86_400.0, "d"), (3_600.0, "h"), (60.0, "m"), (1.0, "s")];
    if !seconds.is_finite() {
        return "–".to_owned();
    }
    if seconds < 0.0 {
        return format!("−{}", duration_in(-seconds, units));
    }
    // Each limit is where the rounded value would reach the next unit, so that "60 m" never occurs.
    if seconds == 0.0 {
        return "0 s".to_owned();
    } else if seconds < 0.000_999_5 {
        return format!("{} µs", trimmed(seconds * 1e6, units - 1));
    } else if seconds < 0.999_5 {
        return format!("{} ms", trimmed(seconds * 1e3, units - 2));
    } else if seconds < 59.95 {
        return format!("{} s", trimmed(seconds, units - 1));
    }
    let top = UNITS.iter().position(|u| seconds >= u.0).unwrap_or(3);
    // From a hundred days on, hours are left out.
    let last = (top + units - 1 - usize::from(seconds >= 100.0 * 86_400.0)).min(3);
    let mut left = (seconds / UNITS[last].0).round() * UNITS[last].0;
    let mut parts = Vec::new();
    for (size, name) in &UNITS[..=last] {
        let whole = (left / size).floor();
        left -= whole * size;
        if whole > 0.0 {
            parts.push(format!("{} {name}", grouped(&format!("{whole:.0}"))));
        }
    }
    parts.join(" ")
}

/// A plain number: thousands in groups, about three significant digits after that.
pub(super) fn number(value: f64) -> String {
    if !value.is_finite() {
        return "–".to_owned();
    }
    let size = value.abs();
    let plain = if size >= 1e15 || (size > 0.0 && size < 1e-4) {
        return format!("{value:.2e}").replace('-', "−");
    } else if value.fract() == 0.0 || size >= 1_000.0 {
        format!("{value:.0}")
    } else if size >= 100.0 {
        trimmed(value, 1)
    } else if size >= 0.1 {
        trimmed(value, 2)
    } else {
        trimmed(value, 4)
    };
    grouped(&plain).replace('-', "−")
}

/// The number with all its digits, for tooltips.
pub(super) fn exact(value: f64) -> String {
    if value.abs() >= 1e15 { format!("{value:e}") } else { grouped(&value.to_string()) }
}

/// Fixed decimals without trailing zeros.
pub(super) fn trimmed(value: f64, decimals: usize) -> String {
    let fixed = format!("{value:.decimals$}");
    if fixed.contains('.') {
        fixed.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        fixed
    }
}

/// Puts a comma between groups of three digits before the decimal point.
fn grouped(plain: &str) -> String {
    let (sign, digits) = plain.strip_prefix('-').map_or(("", plain), |rest| ("-", rest));
    let (whole, fraction) = digits.split_once('.').map_or((digits, None), |(w, f)| (w, Some(f)));
    let mut out = sign.to_owned();
    for (i, c) in whole.chars().enumerate() {
        if i > 0 && (whole.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    if let Some(fraction) = fraction {
        out.push('.');
        out.push_str(fraction);
    }
    out
}

/// A count with its noun: `1 job`, `1,204 jobs`.
pub(super) fn count(n: usize, noun: &str) -> String {
    format!("{} {noun}{}", grouped(&n.to_string()), if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_at_most_two_units() {
        for (seconds, expect) in [
            (0.0, "0 s"),
            (0.000_25, "250 µs"),
            (0.42, "420 ms"),
            (0.999_9, "1 s"),
            (12.34, "12.3 s"),
            (59.96, "1 m"),
            (252.0, "4 m 12 s"),
            (3_599.7, "1 h"),
            (8_040.0, "2 h 14 m"),
            (86_399.0, "1 d"),
            (273_600.0, "3 d 4 h"),
            (1e9, "11,574 d"),
            (-90.0, "−1 m 30 s"),
            (f64::NAN, "–"),
        ] {
            assert_eq!(duration(seconds), expect, "{seconds} s");
        }
        assert_eq!(duration_in(140_700.0, 3), "1 d 15 h 5 m");
    }

    #[test]
    fn numbers_are_short_and_grouped() {
        for (value, expect) in [
            (0.0, "0"),
            (1_204.0, "1,204"),
            (1_234_567.8, "1,234,568"),
            (123.45, "123.5"),
            (3.249, "3.25"),
            (0.012_34, "0.0123"),
            (-7.5, "−7.5"),
            (1e18, "1.00e18"),
            (f64::INFINITY, "–"),
        ] {
            assert_eq!(number(value), expect, "{value}");
        }
        assert_eq!(exact(8_040.25), "8,040.25");
        assert_eq!(count(1, "job"), "1 job");
        assert_eq!(count(12_000, "stay"), "12,000 stays");
    }

    #[test]
    fn text_is_escaped() {
        assert_eq!(html("<img onerror='x'>&\u{0}"), "&lt;img onerror=&#39;x&#39;&gt;&amp;\u{fffd}");
        assert!(!script_safe("\"</script><!--\"").contains('<'));
    }

    #[test]
    fn long_names_keep_both_ends() {
        let clipped = clip(&format!("a{}z", "é".repeat(500)));
        assert_eq!(clipped.chars().count(), NAME_MAX_CHARS);
        assert!(clipped.starts_with('a') && clipped.ends_with('z') && clipped.contains('…'));
        assert_eq!(clip("short"), "short");
    }
}
