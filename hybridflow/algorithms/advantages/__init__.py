"""Advantage estimators, one file each: functions of whole columns (numpy), one value per row or per response token."""
