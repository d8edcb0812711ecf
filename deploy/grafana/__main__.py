"""`python -m deploy.grafana`: write the dashboards' JSON. A test fails where the committed files are not current."""

from deploy.grafana.files import DASHBOARDS, DIRECTORY, file_name, json_text

if __name__ == "__main__":
    for dashboard in DASHBOARDS:
        (DIRECTORY / file_name(dashboard)).write_text(json_text(dashboard))
